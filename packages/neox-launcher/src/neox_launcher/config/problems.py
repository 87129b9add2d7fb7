"""Findings about a configuration, as sentences with place and remedy."""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from neox_launcher.errors import ConfigError

__all__ = [
    "COMMAND_LINE",
    "Place",
    "Problem",
    "as_block",
    "config_error",
    "did_you_mean",
    "in_words",
    "list_problems",
    "place_of",
]

COMMAND_LINE = "command line"
_LONGEST_VALUE = 60


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was written.

    Args:
        file: path of the file as the user gave it, or COMMAND_LINE.
        line: counted from 1; None when the whole file is meant, or the command line.
        spelling: the name as it is written there.
        precedence: a value wins over those of a lower one; 0 for files.
    """

    file: str
    line: int | None = None
    spelling: str = ""
    precedence: int = 0

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file} line {self.line}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding.

    Args:
        name: the parameter, dotted when nested; empty when a whole file is meant.
        what: why the value cannot be, after the name and value.
        remedy: what to do; empty when `what` says it.
        value: as it is shown; None shows the name alone.
        place: where the value was written; None when nothing was written.
    """

    name: str
    what: str
    remedy: str = ""
    value: str | None = None
    place: Place | None = None

    def located(self, place: Place | None, value: str | None) -> "Problem":
        """The same finding with place and value, unless it has its own."""
        if self.place is not None:
            return self
        return replace(self, place=place, value=self.value if self.value is not None else value)


def in_words(value: Any) -> str:
    """A value as YAML users write it, shortened when long."""
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except (TypeError, ValueError):
        text = str(value)
    text = "".join(char if char.isprintable() else " " for char in text)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def as_block(name: str) -> str:
    """How a parameter is written: `a.b` as `a: {b: ...}`."""
    *blocks, last = name.split(".")
    if not blocks:
        return f"{last.replace('_', '-')}: ..."
    return "".join(f"{block}: {{" for block in blocks) + f"{last}: ..." + "}" * len(blocks)


def did_you_mean(name: str, names: Iterable[str], *, dashes: bool = False, cutoff: float = 0.7) -> str:
    """A question with the nearest of the names, or nothing when none is as near as the cutoff (at most 1)."""
    folded = {known.casefold(): known for known in names}
    near = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=cutoff)
    if not near:
        return ""
    found = folded[near[0]]
    return f"did you mean {found.replace('_', '-') if dashes else found}?"


def list_problems(problems: Sequence[Problem], files: Sequence[str], *, called: str = "problem") -> str:
    """All findings, by file and line.

    Args:
        problems: at least one.
        files: the files that were read; findings without a place are told of all of them.
        called: what they are called in the heading.
    """
    unplaced = " + ".join(files) or COMMAND_LINE
    by_file: dict[str, list[Problem]] = {}
    for problem in problems:
        by_file.setdefault(problem.place.file if problem.place else unplaced, []).append(problem)
    parts = []
    for file, found in by_file.items():
        count = f"{len(found)} {called}{'s' if len(found) > 1 else ''}"
        found.sort(key=lambda problem: (problem.place.line or 0) if problem.place else 0)
        parts.append(f"{file}: {count}\n\n" + "\n".join(_paragraph(problem) for problem in found))
    return "\n\n".join(parts)


def config_error(problems: Sequence[Problem], files: Sequence[str]) -> ConfigError:
    """The error that carries all findings."""
    return ConfigError(list_problems(problems, files), problems)


def place_of(places: Mapping[str, Place], name: str) -> Place | None:
    """Where a parameter, or the nearest block around it, was written."""
    while name:
        if name in places:
            return places[name]
        name = name.rpartition(".")[0]
    return None


def _paragraph(problem: Problem) -> str:
    name = problem.place.spelling if problem.place and problem.place.spelling else problem.name
    if problem.value and name:
        name = f"{name}: {problem.value}"
    line = f"line {problem.place.line}  " if problem.place and problem.place.line is not None else ""
    indent = " " * (2 + len(line) if line else 4)
    texts = [text for text in (name, problem.what, problem.remedy) if text]
    rows = [row for text in texts for row in text.splitlines()]
    return "\n".join([f"  {line}{rows[0]}", *(indent + row for row in rows[1:])])
