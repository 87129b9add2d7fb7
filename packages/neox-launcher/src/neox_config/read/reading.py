"""Read YAML files and keep the line of every value.

The syntax is YAML, including JSON, with three differences from PyYAML's `safe_load`: `5e8` and `1_000` are
numbers, colons do not change the base of a number and leading zeros are refused, and there are no dates. A
name given twice in a file is an error; PyYAML would silently keep the last one. Files that are too large, too
deeply nested or too repetitive to be written by hand are refused.
"""

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from neox_config.files import names_in, why_not_readable
from neox_config.problems import COMMAND_LINE, Place, Problem, closest, in_words
from neox_config.read.syntax import TOO_DEEP, explain_syntax, lines_of
from neox_config.schema.scalars import has_points, number_from

__all__ = [
    "Leaf",
    "Reading",
    "Text",
    "add_text",
    "as_yaml",
    "normal_name",
    "read_files",
    "read_override",
]

_ENDINGS = (".yml", ".yaml", ".json")
_NOT_HERE = "check the path (relative to the working directory, or to FOLDER with -d FOLDER)"
_LARGEST_FILE_BYTES = 2**20
_DEEPEST = 40
# Of brackets and blocks while scanning: far more than any value may have.
_DEEPEST_SCANNED = 200
_MOST_NODES = 100_000

# YAML 1.1 and 1.2 differ in its base.
# Longer ones are no numbers of Python.
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]{0,1000}[0-9]")
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
    """One value of a file or of the command line, before its name is looked up.

    Args:
        path: names from the outermost block inwards, with underscores instead of dashes.
        value: the value; never a non-empty mapping.
        place: where the value was written.
        written: the text of a number whose points may separate thousands; None for all other values.
    """

    path: tuple[str, ...]
    value: Any
    place: Place
    written: str | None = None

    @property
    def name(self) -> str:
        """The path as a dotted name."""
        return ".".join(self.path)


@dataclass(frozen=True, slots=True)
class Text:
    """YAML that a program passes instead of a file.

    Args:
        content: the text.
        name: what messages call it, instead of the path of a file.
        precedence: precedence of its values; those of files have 0.
        has_lines: messages name the lines.
    """

    content: str
    name: str
    precedence: int = 0
    has_lines: bool = True


@dataclass(slots=True)
class Reading:
    """Result of reading several files.

    Args:
        leaves: all values, in order.
        problems: errors found while reading.
        files: paths of the files, as shown in messages.
        is_complete: False if values are missing because a file could not be read.
    """

    leaves: list[Leaf] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    is_complete: bool = True


class _Loader(yaml.SafeLoader):
    """Load every plain scalar as a string; `_plain_value` converts it.

    Nesting is limited while scanning, whose time grows with the square of the depth.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:  # noqa: N803
        """Scan an opening bracket."""
        self._limit_depth()
        super().fetch_flow_collection_start(TokenClass)

    def add_indent(self, column: int) -> bool:
        """Begin a block."""
        self._limit_depth()
        return super().add_indent(column)

    def scan_flow_scalar_non_spaces(self, double: bool, start_mark: yaml.Mark) -> list[str]:
        """Scan a part of a text in quotes; an escape sequence may be that of no character."""
        try:
            found: list[str] = super().scan_flow_scalar_non_spaces(double, start_mark)
        except (OverflowError, ValueError) as error:
            problem = "unknown escape character"
            raise yaml.scanner.ScannerError(None, None, problem, self.get_mark()) from error
        return found

    def _limit_depth(self) -> None:
        if self.flow_level + len(self.indents) > _DEEPEST_SCANNED:
            raise yaml.scanner.ScannerError(None, None, TOO_DEEP, self.get_mark())


def read_files(paths: Sequence[str | Path], directory: str | Path | None) -> Reading:
    """Read the values of all files, and collect errors.

    Args:
        paths: paths with or without `.yml`.
        directory: directory that the paths are relative to; None means the working directory.
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
        try:
            text = _text_of(found)
        except (OSError, ValueError) as error:
            what, remedy = f"cannot be read: {error}", "give a YAML file in UTF-8"
            reading.problems.append(Problem("", what, remedy, place=Place(str(found))))
            reading.is_complete = False
        else:
            _add(text, _Reader(Place(str(found))), reading)
    return reading


def read_override(text: str, reading: Reading, *, option: str = "--set", precedence: int = 1) -> None:
    """Add the values of `name=value` from the command line; the value is YAML, and the name may be dotted.

    Args:
        text: `name=value`.
        reading: reading that receives the values.
        option: name of the command-line option, for messages.
        precedence: precedence of the values; higher ones override lower ones.
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
    for candidate in (base, Path(f"{base}.yml"), Path(f"{base}.yaml")):
        if why_not_readable(candidate) is None:
            return candidate
    place = Place(str(base))
    if os.path.isdir(base):
        remedy = f"give the configuration files in it: -d {shlex.quote(str(base))} FILE ..."
        return Problem("", "is a directory, not a file", remedy, place=place)
    reason = why_not_readable(base)
    if reason != "does not exist":
        return Problem("", str(reason), "give a YAML file that you can read", place=place)
    siblings = names_in(base.parent, lambda entry: entry.name.endswith(_ENDINGS))
    near = closest(base.name, siblings, cutoff=0.6)
    remedy = _NOT_HERE if near is None else f"did you mean {base.parent / near}?"
    return Problem("", "file not found", remedy, place=place)


def add_text(given: Text, reading: Reading) -> None:
    """Add the values of a text that is not in a file."""
    reading.files.append(given.name)
    place = Place(given.name, precedence=given.precedence)
    _add(given.content, _Reader(place, has_lines=given.has_lines), reading)


def _add(text: str, reader: "_Reader", reading: Reading) -> None:
    reading.leaves += reader.leaves_of(text, ())
    reading.problems += reader.problems
    reading.is_complete &= reader.is_complete


def as_yaml(value: Any) -> str:
    """Return a value of `--set` that is read as exactly this one: text is quoted where that is necessary."""
    if not isinstance(value, str):
        return json.dumps(value, allow_nan=False)
    reader = _Reader(Place(COMMAND_LINE))
    leaves = reader.leaves_of(value, ("text",))
    if [(type(leaf.value), leaf.value) for leaf in leaves] == [(str, value)] and not reader.problems:
        return value
    quoted = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # Characters that YAML changes or refuses unless they are escaped.
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in quoted)


def _text_of(path: Path) -> str:
    """Return the content of a file.

    Raises:
        OSError: The file cannot be opened.
        ValueError: The file is not UTF-8 text, or it is too large.
    """
    with path.open("rb") as file:
        data = file.read(_LARGEST_FILE_BYTES + 1)
    if len(data) > _LARGEST_FILE_BYTES:
        raise ValueError(f"the file is larger than {_LARGEST_FILE_BYTES:,} bytes")
    text = data.decode("utf-8-sig")
    if re.match(r"(\s|#.*\n|---)*\{", text):
        # Indentation has no meaning in flow style, but PyYAML refuses tabs there.
        text = re.sub(r"(?m)^[ \t]+", lambda found: found.group().replace("\t", "  "), text)
    return text


@dataclass(frozen=True, slots=True)
class _Names:
    """Position of a value in the blocks of a file: normalized names, and names as written."""

    path: tuple[str, ...] = ()
    spelling: str = ""

    def below(self, name: str) -> "_Names":
        return _Names((*self.path, normal_name(name)), f"{self.spelling}.{name}" if self.spelling else name)


class _Reader:
    """Convert one YAML text to leaves; errors are collected in `problems`, and reading continues."""

    def __init__(self, place: Place, *, has_lines: bool = True) -> None:
        self.problems: list[Problem] = []
        self.is_complete = True
        self._place = place
        self._has_lines = has_lines
        self._nodes = 0

    def leaves_of(self, text: str, path: tuple[str, ...]) -> list[Leaf]:
        """Return the values of a text; with an empty path it must be a mapping."""
        node = self._compose(text)
        if node is None:
            return [Leaf(path, None, self._place)] if path and not self.problems else []
        if isinstance(node, yaml.MappingNode) and (node.value or not path):
            leaves: list[Leaf] = []
            self._walk(node, _Names(path, self._place.spelling), leaves, depth=0)
            return leaves if self.is_complete else []
        if not path:
            self._complain(node, "", "is not a mapping of parameters", 'write one "name: value" per line')
            self.is_complete = False
            return []
        value = self._value(node, depth=0)
        return [] if self.problems else [Leaf(path, value, self._place, _written(node))]

    def _compose(self, text: str) -> Any:
        line: int | None = None
        try:
            return yaml.compose(text, Loader=_Loader)
        except yaml.MarkedYAMLError as error:
            line, what, remedy = explain_syntax(error)
        except yaml.reader.ReaderError as error:
            line = len(lines_of(text[: error.position]))
            # The parser has the character of a text as a number, whatever its annotation says.
            what = f"it contains the character U+{int(error.character):04X}"
            remedy = "delete it, or write the text in UTF-8"
        except RecursionError:
            _, what, remedy = explain_syntax(yaml.MarkedYAMLError(problem=TOO_DEEP))
        place = self._place
        if not place.spelling:
            place = Place(place.file, line, _line_of(text, line))
        self.problems.append(Problem("", f"is not valid YAML: {what}", remedy, place=place))
        self.is_complete = False
        return None

    def _walk(self, node: yaml.MappingNode, at: "_Names", leaves: list[Leaf], depth: int) -> None:
        """Add the values below a mapping to `leaves`."""
        if not self._counts(node, depth):
            return
        first_lines: dict[str, int] = {}
        merged: list[yaml.MappingNode] = []
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value == "<<":
                merged += self._merged_mappings(value)
            elif not isinstance(key, yaml.ScalarNode) or not key.value:
                self._complain(key, "", "is not a parameter name", "write a single word as the name")
            elif normal_name(key.value) in first_lines:
                first, line = first_lines[normal_name(key.value)], key.start_mark.line + 1
                what = f"is given twice in this file, in lines {first} and {line}"
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
            value, place = self._value(node, depth + 1), self._at(key, at.spelling)
            leaves.append(Leaf(at.path, value, place, _written(node)))

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
            remedy = "merge a mapping that has an anchor, for example <<: *name"
            self._complain(node, "<<", "does not refer to a mapping", remedy)
        return found

    def _value(self, node: yaml.Node, depth: int) -> Any:
        """Return the Python value of a node that is not a block of parameters."""
        if not self._counts(node, depth) or not self._is_plain_tag(node):
            return None
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, depth + 1) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            return {self._key(key): self._value(value, depth + 1) for key, value in node.value}
        is_text = node.tag == _STR_TAG and getattr(node, "style", None) is not None
        if not is_text and _LEADING_ZERO.fullmatch(str(node.value)):
            what = "starts with a zero: YAML 1.2 reads a decimal number, YAML 1.1 an octal one"
            self._complain(node, node.value, what, "write it without the zero, or put text in quotes")
            return None
        return node.value if is_text else _plain_value(node.value)

    def _key(self, node: yaml.Node) -> str:
        if isinstance(node, yaml.ScalarNode):
            return str(node.value)
        self._complain(node, "", "is not a name", "write a single word as the name")
        return ""

    def _is_plain_tag(self, node: yaml.Node) -> bool:
        if node.tag in _PLAIN_TAGS[type(node)]:
            return True
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        self._complain(node, tag, "is a YAML tag, and tags are not supported", "write the value without it")
        return False

    def _counts(self, node: yaml.Node, depth: int) -> bool:
        """Return False once the file is too deeply nested or too large; each use of an alias counts."""
        self._nodes += 1
        if not self.is_complete:
            return False
        if depth > _DEEPEST or self._nodes > _MOST_NODES:
            self.is_complete = False
            is_deep = depth > _DEEPEST
            what = "is nested too deeply" if is_deep else f"contains more than {_MOST_NODES:,} values"
            self._complain(node, "", what, "check for an alias (*name) that contains or repeats itself")
            return False
        return True

    def _at(self, node: yaml.Node, spelling: str) -> Place:
        if self._place.spelling:
            return self._place
        line = node.start_mark.line + 1 if self._has_lines else None
        return Place(self._place.file, line, spelling, self._place.precedence)

    def _complain(self, node: yaml.Node, spelling: str, what: str, remedy: str) -> None:
        mark = node.start_mark
        line = "" if mark.buffer is None else _line_of(mark.buffer.replace("\0", ""), mark.line + 1)
        place = self._at(node, in_words(spelling or line))
        self.problems.append(Problem("", what, remedy, place=place))


def normal_name(name: str) -> str:
    """Return a name with underscores instead of dashes: `rotary-pct` becomes `rotary_pct`."""
    return name.strip().replace("-", "_")


def _line_of(text: str, line: int | None) -> str:
    """Return a line (numbered from 1) for display, or an empty string after the end."""
    lines = lines_of(text)
    return in_words(lines[line - 1].strip()) if line is not None and line <= len(lines) else ""


def _written(node: yaml.Node) -> str | None:
    """Return the text of a number whose points may separate thousands; None for other nodes."""
    is_one = isinstance(node, yaml.ScalarNode) and has_points(node.value)
    return str(node.value) if is_one else None


def _plain_value(text: str) -> Any:
    """Return the value of a plain (unquoted) scalar."""
    lowered = text.lower()
    if lowered in ("", "~", "null"):
        return None
    if lowered in _TRUE or lowered in _FALSE:
        return lowered in _TRUE
    if lowered in _NOT_FINITE:
        return float(_NOT_FINITE[lowered])
    number = number_from(text)
    return text if number is None else number
