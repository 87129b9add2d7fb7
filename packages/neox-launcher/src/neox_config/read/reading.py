"""Read YAML files and keep the line of every value.

The syntax is YAML, including JSON, with three differences from PyYAML's `safe_load`: `5e8` and `1_000` are
numbers, colons do not change the base of a number and leading zeros are refused, and there are no dates. A
name given twice in a file is an error; PyYAML would silently keep the last one. Files that are too large, too
deeply nested or too repetitive to be written by hand are refused.
"""

import codecs
import difflib
import os
import re
import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from neox_config.facts.checkpoints import complete_checkpoints, is_checkpoint
from neox_config.files import configuration_in, names_in, nearest_folder, why_not_readable
from neox_config.problems import COMMAND_LINE, Place, Problem, in_words
from neox_config.read.syntax import TOO_DEEP, explain_syntax, lines_of
from neox_config.schema.scalars import has_points, number_from

__all__ = [
    "Leaf",
    "Reading",
    "Text",
    "about_folder",
    "add_text",
    "compose",
    "import_of_model",
    "normal_name",
    "read_files",
    "read_override",
    "read_text",
    "text_as_yaml",
    "text_of",
]

_ENDINGS = (".yml", ".yaml", ".json")
_NOT_HERE = "check the path (relative to the working directory, or to FOLDER with -d FOLDER)"
# The file that describes a model of transformers.
_TRANSFORMERS = "config.json"
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
        _read_file(found, reading)
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
    for candidate in (base, base.with_name(base.name + ".yml"), base.with_name(base.name + ".yaml")):
        if why_not_readable(candidate) is None:
            return candidate
    place = Place(str(base))
    if os.path.isdir(base):
        return Problem("", *about_folder(base), place=place)
    reason = why_not_readable(base)
    if reason != "does not exist":
        return Problem("", str(reason), "give a YAML file that you can read", place=place)
    if not os.path.isdir(base.parent):
        folder = nearest_folder(base.parent)
        remedy = f"did you mean {folder}?" if folder else _NOT_HERE
        return Problem("", f"folder {base.parent} does not exist", remedy, place=place)
    endings = (*_ENDINGS, base.suffix) if base.suffix else _ENDINGS
    siblings = names_in(base.parent, lambda entry: entry.name.endswith(endings))
    near = difflib.get_close_matches(base.name, siblings, n=1) or difflib.get_close_matches(
        f"{base.name}.yml", siblings, n=1
    )
    remedy = f"did you mean {base.parent / near[0]}?" if near else _NOT_HERE
    return Problem("", "file not found", remedy, place=place)


def about_folder(folder: Path) -> tuple[str, str]:
    """Return what is wrong with a folder that is given as a configuration, and what to do."""
    meant = configuration_in(folder)
    if meant is not None:
        return "is a directory, not a file", f"did you mean {meant}?"
    imported = import_of_model(folder)
    if imported is not None:
        return "is a model of transformers, not a configuration of a training", imported
    if _has_checkpoints(folder):
        return "is a folder of checkpoints, not a configuration", _about_checkpoints(folder)
    return (
        "is a directory, not a file",
        f"give the configuration files in it: -d {shlex.quote(str(folder))} FILE ...",
    )


def _has_checkpoints(folder: Path) -> bool:
    try:
        return is_checkpoint(folder) or bool(complete_checkpoints(folder))
    except OSError:
        return False


def _about_checkpoints(folder: Path) -> str:
    """Return what is done with a folder of checkpoints, or with one checkpoint."""
    near = filter(None, map(configuration_in, folder.absolute().parents[:2]))
    file = next((shlex.quote(os.path.relpath(each)) for each in near), "FILE")
    return (
        f"to train or use the model, give the configuration of its training: {file}; to describe what is "
        f"saved there: neox-checkpoint inspect {shlex.quote(str(folder))}"
    )


def import_of_model(folder: Path) -> str | None:
    """Return how to train or use the model of transformers in a folder; None if the folder contains none."""
    path = folder / _TRANSFORMERS
    if why_not_readable(path) is not None:
        return None
    try:
        leaves, _ = read_text(text_of(path), str(path))
    except (OSError, ValueError):  # Such a file describes no model.
        return None
    return _import(folder) if _is_of_transformers({leaf.path[0] for leaf in leaves}, path.name) else None


def _import(folder: str | Path) -> str:
    return (
        f"run neox-convert from-hf {shlex.quote(str(folder))} --output NEW, which writes a checkpoint and a "
        "configuration that loads it, and give NEW/model.yml"
    )


def _read_file(path: Path, reading: Reading) -> None:
    place = Place(str(path))
    try:
        text = text_of(path)
    except (OSError, ValueError) as error:
        why, remedy = str(error), "give a YAML file in UTF-8"
        if isinstance(error, UnicodeDecodeError):
            place = Place(str(path), error.object.count(b"\n", 0, error.start) + 1)
            why, convert = _other_encoding(error)
            remedy = f"{remedy}; {convert}"
        # Such as the weights of a model.
        remedy = import_of_model(path.parent) or remedy
        reading.problems.append(Problem("", f"cannot be read: {why}", remedy, place=place))
        reading.is_complete = False
        return
    _add(text, place, reading)


def _other_encoding(error: UnicodeDecodeError) -> tuple[str, str]:
    """Return why a file is not UTF-8, and how it is converted."""
    if error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "it is in UTF-16", "to convert this one: iconv -f utf-16 -t utf-8 FILE > NEW"
    why = f"the byte 0x{error.object[error.start]:02x} is not UTF-8"
    return why, "to convert one in Latin-1: iconv -f latin1 -t utf-8 FILE > NEW"


def add_text(given: Text, reading: Reading) -> None:
    """Add the values of a text that is not in a file."""
    reading.files.append(given.name)
    _add(given.content, Place(given.name, precedence=given.precedence), reading, has_lines=given.has_lines)


def _add(text: str, place: Place, reading: Reading, *, has_lines: bool = True) -> None:
    reader = _Reader(place, has_lines=has_lines)
    leaves = reader.leaves_of(text, ())
    folder, name = os.path.split(place.file)
    if _is_of_transformers({leaf.path[0] for leaf in leaves}, name):
        what = "is a config.json of transformers, not a configuration of a training"
        reading.problems.append(Problem("", what, _import(folder or "."), place=place))
        reading.is_complete = False
        return
    reading.leaves.extend(leaves)
    reading.problems.extend(reader.problems)
    reading.is_complete &= reader.is_complete


def _is_of_transformers(names: Collection[str], file: str) -> bool:
    is_called_so = file == _TRANSFORMERS or "architectures" in names
    return "transformers_version" in names or ("model_type" in names and is_called_so)


def compose(text: str) -> yaml.Node | None:
    """Return the syntax tree of a text, with the position of every node; plain scalars stay strings.

    Raises:
        yaml.YAMLError: The text is not valid YAML.
    """
    node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    return node


def read_text(text: str, file: str) -> tuple[list[Leaf], list[Problem]]:
    """Return the values of a file's text, and the errors in it."""
    reader = _Reader(Place(file))
    return reader.leaves_of(text, ()), reader.problems


def text_as_yaml(text: str) -> str:
    """Return a text as a value of `--set`, quoted where it would be read as something else."""
    reader = _Reader(Place(COMMAND_LINE))
    found = [leaf.value for leaf in reader.leaves_of(text, ("text",))]
    is_plain = found == [text] and isinstance(found[0], str) and not reader.problems
    return text if is_plain else "'" + text.replace("'", "''") + "'"


def text_of(path: Path) -> str:
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
        return [] if self.problems else [Leaf(path, value, self._place, _with_points(node))]

    def _compose(self, text: str) -> Any:
        try:
            return yaml.compose(text, Loader=_Loader)
        except yaml.MarkedYAMLError as error:
            self._syntax_problem(error, text)
        except yaml.reader.ReaderError as error:
            self._unprintable(error, text)
        except yaml.YAMLError as error:
            self._whole("is not valid YAML", str(error))
        except RecursionError:
            self._whole("is nested too deeply", "reduce the nesting; no parameter needs it")
        self.is_complete = False
        return None

    def _syntax_problem(self, error: yaml.MarkedYAMLError, text: str) -> None:
        slip = explain_syntax(error, text)
        place = self._place
        if not place.spelling:
            place = Place(place.file, slip.line, _line_of(text, slip.line))
        self.problems.append(Problem("", f"is not valid YAML: {slip.what}", slip.remedy, place=place))

    def _unprintable(self, error: yaml.reader.ReaderError, text: str) -> None:
        line = len(lines_of(text[: error.position]))
        place = self._place
        if not place.spelling:
            place = Place(place.file, line, _line_of(text, line))
        # The parser has the character of a text as a number, whatever its annotation says.
        number, remedy = int(error.character), "delete it"
        what = f"contains the character U+{number:04X}, which YAML does not allow"
        if 0xDC80 <= number <= 0xDCFF:
            # Python represents bytes that it cannot decode by these characters.
            encoding = sys.getfilesystemencoding()
            what = f"contains the byte 0x{number - 0xDC00:02x}, which cannot be decoded as {encoding}"
            remedy = "write it in UTF-8" if encoding == "utf-8" else "set PYTHONUTF8=1"
        self.problems.append(Problem("", what, remedy, place=place))

    def _walk(self, node: yaml.MappingNode, at: "_Names", leaves: list[Leaf], depth: int) -> None:
        """Add the values below a mapping to `leaves`."""
        if not self._counts(node, depth):
            return
        first_lines: dict[str, int] = {}
        merged: list[yaml.MappingNode] = []
        for key, value in node.value:
            if _is_merge(key):
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
            leaves.append(Leaf(at.path, value, place, _with_points(node)))

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
            self._complain_of_zero(node, is_whole=depth == 0)
            return None
        return node.value if is_text else _plain_value(node.value)

    def _complain_of_zero(self, node: yaml.Node, *, is_whole: bool) -> None:
        digits = node.value.replace("_", "")
        what, text = "starts with a zero: YAML 1.2 reads a decimal number", "or put text in quotes"
        if is_whole:
            text += self._place.within_quotes_of_shell(node.value)
        remedy = f"write {int(digits)}, {text}"
        if not set(digits) & set("89"):
            what += ", YAML 1.1 an octal one"
            numbers = dict.fromkeys((int(digits), int(digits, 8)))
            remedy = f"write {' or '.join(map(str, numbers))}, {text}"
        self._complain(node, node.value, what, remedy)

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
        self.problems.append(
            Problem("", what, remedy, place=self._at(node, in_words(spelling or _line_at(node.start_mark))))
        )

    def _whole(self, what: str, remedy: str) -> None:
        self.problems.append(Problem("", what, remedy, place=self._place))


def _is_merge(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.value == "<<"


def normal_name(name: str) -> str:
    """Return a name with underscores instead of dashes: `rotary-pct` becomes `rotary_pct`."""
    return name.strip().replace("-", "_")


def _line_at(mark: Any) -> str:
    """Return the text of the line that a mark points to."""
    return "" if mark.buffer is None else _line_of(mark.buffer.replace("\0", ""), mark.line + 1)


def _line_of(text: str, line: int | None) -> str:
    """Return a line (numbered from 1) for display, or an empty string after the end."""
    lines = lines_of(text)
    return in_words(lines[line - 1].strip()) if line is not None and line <= len(lines) else ""


def _with_points(node: yaml.Node) -> str | None:
    """Return the text of a number whose points may separate thousands."""
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
