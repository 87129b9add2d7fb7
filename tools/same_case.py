"""What tools/test_same.py compares: a case is files, commands and what is read afterwards."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

__all__ = ["Case", "Command", "Part", "chosen"]


@dataclass(frozen=True)
class Command:
    """A command of a checkout, run in the folder of its case.

    Args:
        arguments: the name of a console script, or `-m` and a module, then its arguments.
        ranks: number of processes, with torchrun's variables if there are several.
        shows: its output is compared, too; that of a command that fails always is.
    """

    arguments: tuple[str, ...]
    ranks: int = 1
    shows: bool = False


@dataclass(frozen=True)
class Case:
    """Commands that both checkouts run, each in a new folder.

    Args:
        group: the row of the report.
        name: unique in its group.
        commands: run in turn; the first that fails is the last.
        files: texts to write first, by path in the folder.
        copies: what to copy into the folder first: path there -> a path in the folder of inputs, or
            `base:CASE:PATH` for what the base left in the folder of another case.
        metrics: the file of metrics to read.
        checkpoints: checkpoints whose tensors and records to read.
        patterns: files that the commands write, compared byte for byte (JSON, YAML and text: without paths).
        uninterrupted: a case of the base whose iterations and last weights this one must repeat.
    """

    group: str
    name: str
    commands: tuple[Command, ...]
    files: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    metrics: str | None = None
    checkpoints: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    uninterrupted: str | None = None

    @property
    def title(self) -> str:
        """Return the group and the name, as CASE accepts them."""
        return f"{self.group}: {self.name}"

    @property
    def slug(self) -> str:
        """Return a name for files."""
        digest = hashlib.sha256(self.title.encode()).hexdigest()[:8]
        return f"{re.sub('[^a-z0-9]+', '-', self.title.lower())[:80]}-{digest}"

    def key(self, *surroundings: str) -> str:
        """Return a digest of all that determines its result in one checkout."""
        text = json.dumps([asdict(self), *surroundings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def needed(self) -> set[str]:
        """Return the titles of the cases of the base that this one reads."""
        copied = {
            source.split(":", 1)[1].rpartition(":")[0] for source in self.copies.values() if ":" in source
        }
        return copied | ({self.uninterrupted} if self.uninterrupted else set())


@dataclass(frozen=True)
class Part:
    """The k-th n-th of a table."""

    k: int
    n: int

    @classmethod
    def parse(cls, text: str) -> "Part":
        """Return the part that `k/n` names.

        Raises:
            ValueError: the text is no part.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(f"PART={text} is not k/n with k from 1 to n; use 1/10 for the first tenth")
        return cls(int(match[1]), int(match[2]))

    def has(self, *places: tuple[int, int]) -> bool:
        """Return whether a cell of a table is in this part.

        Each of up to 17 parts has every value of every axis of 17 x 8 x 3: positions count as digits.

        Args:
            places: position on each axis, and the length of the axis.
        """
        (first, _), *others = places
        number = 0
        for position, length in reversed(others):
            number = number * length + position
        return (number + first) % self.n == self.k - 1


def chosen(cases: Iterable[Case], *, name: str | None, groups: Sequence[str]) -> list[Case]:
    """Return the cases of these groups (all: none given) whose title has the text `name`."""
    return [
        case
        for case in cases
        if (not groups or case.group in groups) and (name is None or name.lower() in case.title.lower())
    ]
