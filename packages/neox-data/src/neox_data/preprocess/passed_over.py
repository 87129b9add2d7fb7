"""Count files, or members of archives, and name the first few."""

from collections.abc import Iterable

from neox_data.pluralize import pluralize

__all__ = ["PassedOver"]

_MOST_NAMED = 5


class PassedOver:
    """Counts files and members of archives that are not read, and keeps the first few names.

    Attributes:
        count: number of files and members.
        first: the first few names, with the archive of each member.
    """

    def __init__(self, count: int = 0, first: Iterable[str] = ()) -> None:
        self.count = count
        self.first = list(first)[:_MOST_NAMED]

    def add(self, name: str) -> None:
        """Record a file or member."""
        self.count += 1
        if len(self.first) < _MOST_NAMED:
            self.first.append(name)

    def lines(self) -> Iterable[str]:
        """Yield the lines of a summary; none if there are no such files."""
        if self.count:
            one = "file, folder or member of an archive was not read, because of its name or kind"
            many = "files, folders or members of archives were not read, because of their name or kind"
            yield f"{pluralize(self.count, one, many)}:"
            yield from (f"  {name}" for name in self.first)
        if self.count > len(self.first):
            yield f"  and {self.count - len(self.first):,} more"
