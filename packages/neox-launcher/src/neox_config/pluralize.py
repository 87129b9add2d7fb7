"""Numbers with their nouns, and the beginnings of lists."""

from collections.abc import Sequence

__all__ = ["first_few", "pluralize"]


def pluralize(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun: 1 document, 2,000 documents; `many` is the plural of `one`."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def first_few(names: Sequence[object], most: int, *, number: int | None = None) -> str:
    """Return the first names of a list, and how many follow: `a, b and 3 more`.

    Args:
        names: the list, or its beginning.
        most: how many are named.
        number: length of the list; None: all of it is given.
    """
    more = (len(names) if number is None else number) - min(most, len(names))
    return ", ".join(map(str, names[:most])) + (f" and {more:,} more" if more > 0 else "")
