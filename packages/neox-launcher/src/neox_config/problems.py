"""Problems of a configuration: messages with location and remedy."""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from neox_config.errors import ConfigError

__all__ = [
    "COMMAND_LINE",
    "DEFAULTS",
    "Place",
    "Problem",
    "as_block",
    "closest",
    "config_error",
    "did_you_mean",
    "in_words",
    "list_problems",
    "place_near",
    "place_of",
    "refusals",
]

COMMAND_LINE = "command line"
DEFAULTS = "default values"
"""The place of values that were not given, named like a file."""
_LONGEST_VALUE = 60


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a value.

    Args:
        file: path of the file as given by the user, COMMAND_LINE or DEFAULTS.
        line: line number, starting at 1; None for the whole file or the command line.
        spelling: name of the parameter as written there.
        precedence: values override those with lower precedence; 0 for files.
    """

    file: str
    line: int | None = None
    spelling: str = ""
    precedence: int = 0

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file} line {self.line}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a configuration.

    Args:
        name: dotted name of the parameter; empty for a whole file.
        what: what is wrong, continuing a sentence that starts with the name and value.
        remedy: what to do; empty if `what` includes it.
        value: the value as shown; None shows only the name.
        place: location of the value; None if it was not given.
        code: the rule that found it, such as `optimizer.betas_fit`; empty outside `neox_config.rules`.
    """

    name: str
    what: str
    remedy: str = ""
    value: str | None = None
    place: Place | None = None
    code: str = ""

    def located(self, place: Place | None, value: str | None) -> "Problem":
        """Return the problem with a location and value, unless it already has them."""
        if self.place is not None:
            return self
        return replace(self, place=place, value=self.value if self.value is not None else value)


def refusals(*rows: tuple[object, str, str, str]) -> Iterator[Problem]:
    """Yield the problems of a rule.

    Args:
        rows: whether there is a problem, the parameter, what is wrong, and what to do.
    """
    return (Problem(name, what, remedy) for is_wrong, name, what, remedy in rows if is_wrong)


def in_words(value: Any) -> str:
    """Return a value as written in YAML, shortened if it is long.

    Text is quoted if it would not be seen otherwise: empty, with blanks around it or control characters.
    """
    is_plain = isinstance(value, str) and value.isprintable() and value == value.strip() != ""
    try:
        text = value if is_plain else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    text = "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def as_block(name: str) -> str:
    """Return how to write a parameter in a file: `a.b` as `a: {b: ...}`."""
    *blocks, last = name.split(".")
    if not blocks:
        return f"{last.replace('_', '-')}: ..."
    return "".join(f"{block}: {{" for block in blocks) + f"{last}: ..." + "}" * len(blocks)


def did_you_mean(name: str, names: Iterable[str], *, cutoff: float = 0.7) -> str:
    """Return "did you mean X?" for the closest name, or an empty string if none is closer than the cutoff."""
    found = closest(name, names, cutoff=cutoff)
    return "" if found is None else f"did you mean {found}?"


def closest(name: str, names: Iterable[str], *, cutoff: float = 0.7) -> str | None:
    """Return the name with the most similar spelling, or None if none is closer than the cutoff."""
    folded = {known.casefold(): known for known in names}
    near = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=cutoff)
    return folded[near[0]] if near else None


def list_problems(problems: Sequence[Problem], files: Sequence[str], *, called: str = "problem") -> str:
    """Format problems by file and line.

    Args:
        problems: one or more problems.
        files: files that were read; problems without a location are listed under all of them.
        called: noun for the problems in the heading.
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
    """Return an error with all problems."""
    return ConfigError(list_problems(problems, files), problems)


def place_of(places: Mapping[str, Place], name: str) -> Place | None:
    """Return the location of a parameter, or of the innermost block around it that was given."""
    while name:
        if name in places:
            return places[name]
        name = name.rpartition(".")[0]
    return None


def place_near(places: Mapping[str, Place], name: str) -> Place | None:
    """Return the location of a parameter; of a missing one, that of the first given one in its block."""
    found = place_of(places, name)
    block = name.rpartition(".")[0]
    while found is None and block:
        inside = (place for given, place in places.items() if given.startswith(f"{block}."))
        beside = min(inside, key=lambda place: place.line or 0, default=None)
        # The name that is written there is another parameter's.
        found = None if beside is None else replace(beside, spelling="")
        block = block.rpartition(".")[0]
    return found


def _paragraph(problem: Problem) -> str:
    name = problem.place.spelling if problem.place and problem.place.spelling else problem.name
    if problem.value and name:
        name = f"{name}: {problem.value}"
    line = f"line {problem.place.line}  " if problem.place and problem.place.line is not None else ""
    indent = " " * (2 + len(line) if line else 4)
    texts = [text for text in (name, problem.what, problem.remedy) if text]
    rows = [row for text in texts for row in text.splitlines()]
    return "\n".join([f"  {line}{rows[0]}", *(indent + row for row in rows[1:])])
