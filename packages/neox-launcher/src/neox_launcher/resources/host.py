"""One host of a job. Apart from the configuration, so that nodes load nothing of it: they start sooner."""

from dataclasses import dataclass

__all__ = ["Host"]


@dataclass(frozen=True, slots=True)
class Host:
    """One host of a job.

    Args:
        name: how it is reached.
        slots: device numbers used on it, one worker each.
    """

    name: str
    slots: tuple[int, ...]
