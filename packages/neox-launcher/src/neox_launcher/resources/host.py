"""One host of a job. Does not import the configuration, so that agents start faster."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Host", "name_some", "some_lines"]

_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Host:
    """One host of a job.

    Args:
        name: host name or address.
        slots: device numbers that are used on it, one worker each.
    """

    name: str
    slots: tuple[int, ...]


def name_some(names: Sequence[object]) -> str:
    """Join names for a message, abbreviating long lists: `worker-1, worker-2 and 3 more`."""
    more = len(names) - _MOST_NAMED
    return ", ".join(map(str, names[:_MOST_NAMED])) + (f" and {more:,} more" if more > 0 else "")


def some_lines(lines: Sequence[str], most: int = _MOST_NAMED) -> list[str]:
    """Return the first lines of a long list, and a line that states how many are left out."""
    more = len(lines) - most
    return [*lines[:most], *([f"... and {more:,} more"] if more > 0 else [])]
