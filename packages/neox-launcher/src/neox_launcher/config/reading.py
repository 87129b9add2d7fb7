"""Reading YAML files as people write them, keeping the line of every value.

The syntax is YAML's, JSON included, with three differences from PyYAML's `safe_load`: numbers such as `5e8`
and `1_000` are numbers, leading zeros and colons make no other number of one, and nothing is a date. A name
given twice in a file is an error where PyYAML would keep the last one silently. Files are given by people,
not by programs, so whatever is larger, deeper or more repeated than a person writes is refused.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from neox_launcher.config.problems import COMMAND_LINE, Place, Problem, in_words
from neox_launcher.config.scalars import number_from
from neox_launcher.config.syntax import explain_syntax, lines_of

__all__ = ["Leaf", "Reading", "compose", "normal_name", "read_files", "read_override", "read_text", "text_of"]

_LARGEST_FILE_BYTES = 2**20
_DEEPEST = 40
_MOST_NODES = 100_000

_STR_TAG = "tag:yaml.org,2002:str"
_SCALAR_TAGS = {
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "merge", "value")
}
_PLAIN_TAGS: dict[type[yaml.Node], set[str]] = {
    yaml.ScalarNode: _SCALAR_TAGS,
    yaml.SequenceNode: {"tag:yaml.org,2002:seq"},
    yaml.MappingNode: {"tag:yaml.org,2002:map"},
}
_TRUE = ("true", "yes", "on")
_FALSE = ("false", "no", "off")
_NOT_FINITE = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value that was written, whatever its name turns out to mean.

    Args:
        path: the names from the outermost, dashes turned into underscores.
        value: the value; never a mapping that has entries.
        place: where it stands.
    """

    path: tuple[str, ...]
    value: Any
    place: Place

    @property
    def name(self) -> str:
        """The path, dotted."""
        return ".".join(self.path)


@dataclass(slots=True)
class Reading:
    """What was read from several files.

    Args:
        leaves: every value, in order.
        problems: what could not be read.
        files: paths of the files, as they are named in messages.
        is_complete: nothing was left out because a file could not be read.
    """

    leaves: list[Leaf] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    is_complete: bool = True


class _Loader(yaml.SafeLoader):
    """Leaves every plain word a string: `_plain_value` decides what it is."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012


def read_files(paths: Sequence[str | Path], directory: str | Path | None) -> Reading:
    """The values of all files and what is wrong with them.

    Args:
        paths: with or without `.yml`.
        directory: what the paths are relative to.
    """
    reading = Reading()
    for path in paths:
        found = _find_file(Path(path), None if directory is None else Path(directory))
        if isinstance(found, Problem):
            reading.problems.append(found)
            reading.files.append(str(path))
            reading.is_complete = False
            continue
        reading.files.append(str(found))
        _read_file(found, reading)
    return reading


def read_override(text: str, reading: Reading, *, option: str = "--set", precedence: int = 1) -> None:
    """Add the values of `name=value` from the command line; the value is YAML, the name may be dotted.

    Args:
        text: `name=value`.
        reading: receives the values.
        option: how the option is called.
        precedence: of the values; those of a higher one win.
    """
    name, sign, value = text.partition("=")
    path = tuple(normal_name(part) for part in name.strip().split("."))
    place = Place(COMMAND_LINE, None, f"{option} {name.strip()}", precedence)
    if not sign or not all(path):
        place = Place(COMMAND_LINE, None, f"{option} {text}", precedence)
        reading.problems.append(Problem("", "is not name=value", f"write {option} name=value", place=place))
        return
    reader = _Reader(place)
    reading.leaves += reader.leaves_of(value, path)
    reading.problems += reader.problems


def _find_file(path: Path, directory: Path | None) -> Path | Problem:
    base = path if directory is None else directory / path
    for candidate in (base, base.with_name(base.name + ".yml"), base.with_name(base.name + ".yaml")):
        if candidate.is_file():
            return candidate
    place = Place(str(base))
    if base.is_dir():
        return Problem(
            "", "is a folder, not a file", "name a YAML file in it, or give the folder with -d", place=place
        )
    siblings = [entry.name for entry in base.parent.iterdir()] if base.parent.is_dir() else []
    near = difflib.get_close_matches(base.name, siblings, n=1) or difflib.get_close_matches(
        f"{base.name}.yml", siblings, n=1
    )
    remedy = f"did you mean {base.parent / near[0]}?" if near else "check the path"
    return Problem("", "there is no such file", remedy, place=place)


def _read_file(path: Path, reading: Reading) -> None:
    place = Place(str(path))
    try:
        text = text_of(path)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reading.problems.append(
            Problem("", f"cannot be read: {error}", "give a YAML file in UTF-8", place=place)
        )
        reading.is_complete = False
        return
    reader = _Reader(place)
    reading.leaves.extend(reader.leaves_of(text, ()))
    reading.problems.extend(reader.problems)
    reading.is_complete &= reader.is_complete


def compose(text: str) -> yaml.Node | None:
    """The syntax tree of a file, with the place of every node; plain words are left words.

    Raises:
        yaml.YAMLError: it is not YAML.
    """
    node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    return node


def read_text(text: str, file: str) -> tuple[list[Leaf], list[Problem]]:
    """The values of a file's text, and what is wrong with it."""
    reader = _Reader(Place(file))
    return reader.leaves_of(text, ()), reader.problems


def text_of(path: Path) -> str:
    """What a file holds.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is no text of a size that people write.
    """
    with path.open("rb") as file:
        data = file.read(_LARGEST_FILE_BYTES + 1)
    if len(data) > _LARGEST_FILE_BYTES:
        raise ValueError(f"it is larger than {_LARGEST_FILE_BYTES:,} bytes")
    text = data.decode("utf-8-sig")
    if re.match(r"(\s|#.*\n|---)*\{", text):
        # In braces style indentation means nothing, but PyYAML refuses a tab there.
        text = re.sub(r"(?m)^[ \t]+", lambda found: found.group().replace("\t", "  "), text)
    return text


@dataclass(frozen=True, slots=True)
class _Names:
    """Where in a file's blocks a value stands: names as they are compared, and as they are written."""

    path: tuple[str, ...] = ()
    spelling: str = ""

    def below(self, name: str) -> "_Names":
        return _Names((*self.path, normal_name(name)), f"{self.spelling}.{name}" if self.spelling else name)


class _Reader:
    """Turns one YAML text into leaves; what cannot be read becomes problems, and the rest goes on."""

    def __init__(self, place: Place) -> None:
        self.problems: list[Problem] = []
        self.is_complete = True
        self._place = place
        self._nodes = 0

    def leaves_of(self, text: str, path: tuple[str, ...]) -> list[Leaf]:
        """The values of a text; with an empty path it must be a mapping."""
        node = self._compose(text)
        if node is None:
            return [Leaf(path, None, self._place)] if path and not self.problems else []
        if isinstance(node, yaml.MappingNode) and (node.value or not path):
            leaves: list[Leaf] = []
            self._walk(node, _Names(path, self._place.spelling), leaves, depth=0)
            return leaves if self.is_complete else []
        if not path:
            self._complain(node, "", "is not a list of parameters", 'write one "name: value" per line')
            self.is_complete = False
            return []
        value = self._value(node, depth=0)
        return [] if self.problems else [Leaf(path, value, self._place)]

    def _compose(self, text: str) -> Any:
        try:
            return yaml.compose(text, Loader=_Loader)
        except yaml.MarkedYAMLError as error:
            self._syntax_problem(error, text)
        except yaml.YAMLError as error:
            self._whole("is not YAML", str(getattr(error, "reason", error)))
        except RecursionError:
            self._whole("is nested too deeply", "no parameter needs that")
        self.is_complete = False
        return None

    def _syntax_problem(self, error: yaml.MarkedYAMLError, text: str) -> None:
        slip = explain_syntax(error, text)
        place = self._place
        if not place.spelling:
            place = Place(place.file, slip.line, _line_of(text, slip.line))
        self.problems.append(Problem("", f"is not YAML: {slip.what}", slip.remedy, place=place))

    def _walk(self, node: yaml.MappingNode, at: "_Names", leaves: list[Leaf], depth: int) -> None:
        """Add the leaves below a mapping."""
        if not self._counts(node, depth):
            return
        first_lines: dict[str, int] = {}
        merged: list[yaml.MappingNode] = []
        for key, value in node.value:
            if _is_merge(key):
                merged += self._merged_mappings(value)
            elif not isinstance(key, yaml.ScalarNode) or not key.value:
                self._complain(key, "", "is not a name", "a parameter's name is a word")
            elif normal_name(key.value) in first_lines:
                first, line = first_lines[normal_name(key.value)], key.start_mark.line + 1
                what = f"is given twice in this file: in lines {first} and {line}"
                self._complain(key, key.value, what, "keep one of them")
            else:
                first_lines[normal_name(key.value)] = key.start_mark.line + 1
                self._walk_value(key, value, at.below(key.value), leaves, depth)
        for mapping in merged:
            self._walk_merged(mapping, at, leaves, set(first_lines), depth)

    def _walk_value(
        self, key: yaml.ScalarNode, node: yaml.Node, at: "_Names", leaves: list[Leaf], depth: int
    ) -> None:
        if isinstance(node, yaml.MappingNode) and node.value and self._is_plain_tag(node):
            self._walk(node, at, leaves, depth + 1)
        else:
            leaves.append(Leaf(at.path, self._value(node, depth + 1), self._at(key, at.spelling)))

    def _walk_merged(
        self, node: yaml.MappingNode, at: "_Names", leaves: list[Leaf], taken: set[str], depth: int
    ) -> None:
        below: list[Leaf] = []
        self._walk(node, at, below, depth + 1)
        leaves += [leaf for leaf in below if leaf.path[len(at.path)] not in taken]
        taken.update(leaf.path[len(at.path)] for leaf in below)

    def _merged_mappings(self, node: yaml.Node) -> list[yaml.MappingNode]:
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        found = [item for item in nodes if isinstance(item, yaml.MappingNode)]
        if len(found) != len(nodes):
            remedy = "merge an anchored mapping, as in <<: *name"
            self._complain(node, "<<", "does not name a mapping", remedy)
        return found

    def _value(self, node: yaml.Node, depth: int) -> Any:
        """The Python value of a node that is no block of parameters."""
        if not self._counts(node, depth) or not self._is_plain_tag(node):
            return None
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, depth + 1) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            return {self._key(key): self._value(value, depth + 1) for key, value in node.value}
        is_text = node.tag == _STR_TAG and getattr(node, "style", None) is not None
        return node.value if is_text else _plain_value(node.value)

    def _key(self, node: yaml.Node) -> str:
        if isinstance(node, yaml.ScalarNode):
            return str(node.value)
        self._complain(node, "", "is not a name", "a name is a word")
        return ""

    def _is_plain_tag(self, node: yaml.Node) -> bool:
        if node.tag in _PLAIN_TAGS[type(node)]:
            return True
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        self._complain(node, tag, "is a tag, and tags are not read", "write the value itself")
        return False

    def _counts(self, node: yaml.Node, depth: int) -> bool:
        """Whether the file is still of a size that people write; aliases count each time they are used."""
        self._nodes += 1
        if not self.is_complete:
            return False
        if depth > _DEEPEST or self._nodes > _MOST_NODES:
            self.is_complete = False
            what = "is nested too deeply" if depth > _DEEPEST else f"holds more than {_MOST_NODES:,} values"
            self._complain(node, "", what, "look for an alias (*name) that contains or repeats itself")
            return False
        return True

    def _at(self, node: yaml.Node, spelling: str) -> Place:
        if self._place.spelling:
            return self._place
        return Place(self._place.file, node.start_mark.line + 1, spelling)

    def _complain(self, node: yaml.Node, spelling: str, what: str, remedy: str) -> None:
        self.problems.append(
            Problem("", what, remedy, place=self._at(node, in_words(spelling or _line_at(node.start_mark))))
        )

    def _whole(self, what: str, remedy: str) -> None:
        self.problems.append(Problem("", what, remedy, place=self._place))


def _is_merge(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.value == "<<"


def normal_name(name: str) -> str:
    """A name as names are compared: `rotary-pct` is `rotary_pct`."""
    return name.strip().replace("-", "_")


def _line_at(mark: Any) -> str:
    """The text of the line that a mark points into."""
    return "" if mark.buffer is None else _line_of(mark.buffer.replace("\0", ""), mark.line + 1)


def _line_of(text: str, line: int | None) -> str:
    """A line, counted from 1, as it is shown; empty behind the end."""
    lines = lines_of(text)
    return in_words(lines[line - 1].strip()) if line is not None and line <= len(lines) else ""


def _plain_value(text: str) -> Any:
    """What a word without quotes stands for."""
    lowered = text.lower()
    if lowered in ("", "~", "null"):
        return None
    if lowered in _TRUE or lowered in _FALSE:
        return lowered in _TRUE
    if lowered in _NOT_FINITE:
        return float(_NOT_FINITE[lowered])
    number = number_from(text)
    return text if number is None else number
