"""Conditions under which a parameter has an effect, in words, for `used_when`."""

from collections.abc import Iterable

__all__ = ["one_of"]


def one_of(names: Iterable[str]) -> str:
    """Return at least one name as an enumeration, such as `a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
