"""Replace shorthands and older spellings in a file by parameters, and remove names without effect.

The text is edited in place, one name at a time, so that comments, order and formatting are preserved. The
result must have the same meaning as the original; otherwise nothing is changed.

ruamel.yaml, which reads a file and writes it again with its comments, was tried instead (0.19.1, without
replacing a name). It returns the files in configs/ unchanged, which are in block style. But GPT-NeoX files
are usually in braces, and these become one line without comments: the guide's example of 84 lines and 13
comments has 2 lines and 1 comment left.
"""

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from neox_config.atomic import atomic_write
from neox_config.errors import ConfigError
from neox_config.problems import config_error
from neox_config.read.aliases import (
    OLDER_SPELLINGS,
    fold_aliases,
    has_no_effect,
    shorthand_of,
    usual_value,
)
from neox_config.read.reading import Leaf, compose, normal_name, read_files, read_text, text_of
from neox_config.schema.config import field_named
from neox_config.schema.parameter import inner_section

__all__ = ["Migrated", "migrate_file", "migrate_text", "replace_file"]

_Names = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrated:
    """A file with replaced names.

    Args:
        path: path of the file.
        text: new content of the file.
        changes: one line for each replaced name.
    """

    path: Path
    text: str
    changes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A name and its value in a file, and the mapping that contains them."""

    path: _Names
    key: yaml.ScalarNode
    value: yaml.Node
    mapping: yaml.MappingNode

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def line(self) -> int:
        return int(self.key.start_mark.line) + 1

    def text_of_value(self, text: str) -> str:
        """Return the value as written in the text of the file."""
        return text[self.value.start_mark.index : self.value.end_mark.index]


def migrate_file(path: str | Path, directory: str | Path | None = None) -> Migrated:
    """Return the text of a file without shorthands and older spellings.

    Args:
        path: the file, with or without `.yml`.
        directory: directory that the path is relative to.

    Raises:
        ConfigError: The file cannot be read, contradicts itself, or cannot be migrated automatically.
    """
    reading = read_files([path], directory)
    if reading.problems:
        raise config_error(reading.problems, reading.files)
    found = Path(reading.files[0])
    text, changes = migrate_text(text_of(found), str(found))
    return Migrated(path=found, text=text, changes=tuple(changes))


def replace_file(migrated: Migrated) -> None:
    """Replace the file atomically by the new text."""
    target = migrated.path.resolve()
    try:
        with atomic_write(target) as file:
            file.write(migrated.text)
            os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be replaced: {error}; run without --in-place and save the output elsewhere"
        ) from error


def migrate_text(text: str, file: str) -> tuple[str, list[str]]:
    """Return a text with replaced names, and one line for each replacement.

    Raises:
        ConfigError: See `migrate_file`.
    """
    meant = _meaning(text, file)
    given = {leaf.name: leaf.value for leaf in read_text(text, file)[0]}
    changes: list[str] = []
    given_up: set[tuple[_Names, str]] = set()
    while (step := _next_step(text, given, given_up)) is not None:
        entry, targets = step
        changed = _Edit(text, entry).carry_out(targets)
        if changed is None or not _is_yaml(changed):
            given_up.add((entry.path, entry.text_of_value(text)))
            continue
        text = changed
        written = targets.get(entry.name) or ", ".join(targets) or "removed: it has no effect"
        changes.append(f"{entry.name} -> {written}")
    if _meaning(text, file) != meant:
        raise ConfigError(f"{file}: cannot be migrated without changing its meaning; edit it by hand")
    return text, changes


def _meaning(text: str, file: str) -> dict[str, Any]:
    """Return the values of a text by parameter, with all aliases replaced and without empty blocks."""
    leaves, problems = read_text(text, file)
    unfolded = fold_aliases(leaves)
    if problems or unfolded.problems:
        raise config_error([*problems, *unfolded.problems], [file])
    found: dict[str, Any] = {}
    for leaf in unfolded.leaves:
        if found.setdefault(leaf.name, leaf.value) != leaf.value:
            raise ConfigError(f"{file}: gives {leaf.name} two values; run neox-config check {file}")
    return {name: value for name, value in found.items() if value is not None and value != {}}


@lru_cache(maxsize=2)
def _tree(text: str) -> yaml.Node | None:
    """Return the syntax tree of the current text; parsing it is what takes time."""
    return compose(text)


def _is_yaml(text: str) -> bool:
    try:
        _tree(text)
    except yaml.YAMLError:
        return False
    return True


def _next_step(
    text: str, original: Mapping[str, Any], given_up: set[tuple[_Names, str]]
) -> tuple[_Entry, Mapping[str, str]] | None:
    """Return the first name to replace, and its parameters with their values as text.

    Args:
        text: the text after the previous steps.
        original: values before the first step; some translations depend on several of them.
        given_up: entries that could not be replaced, by path and text of the value.
    """
    leaves = {leaf.name: leaf for leaf in read_text(text, "")[0]}
    for entry in _entries(_tree(text), ()):
        is_given_up = (entry.path, entry.text_of_value(text)) in given_up
        targets = None if is_given_up else _targets(entry, text, leaves, original)
        if targets is not None:
            return entry, targets
    return None


def _entries(node: yaml.Node | None, path: _Names) -> Iterator[_Entry]:
    """Yield every name below a node, outer names first."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value != "<<":
            inner = (*path, normal_name(key.value))
            yield _Entry(inner, key, value, node)
            yield from _entries(value, inner)


def _targets(
    entry: _Entry, text: str, leaves: Mapping[str, Leaf], original: Mapping[str, Any]
) -> Mapping[str, str] | None:
    """Return the parameters that replace an entry; none if it has no effect, None if it stays."""
    shorthand, leaf = shorthand_of(entry.name), leaves.get(entry.name)
    if shorthand is not None:
        # Left when all names in a block were moved.
        declared = field_named(shorthand)
        is_block = declared is not None and inner_section(declared) is not None
        is_empty = is_block and leaf is not None and leaf.value is None
        return {} if is_empty else {shorthand: entry.text_of_value(text)}
    if leaf is None:
        return None
    given = {**original, **{name: each.value for name, each in leaves.items()}}
    if entry.name in OLDER_SPELLINGS:
        found = OLDER_SPELLINGS[entry.name].translate(leaf.value, given)
        return {name: json.dumps(value) for name, value in found.items()}
    if has_no_effect(leaf, given) is not None:
        return {}
    usual = usual_value(entry.name, leaf.value)
    return None if usual == leaf.value else {entry.name: json.dumps(usual)}


class _Edit:
    """Replacement of one name.

    Args:
        text: text of the whole file.
        entry: entry to replace.
    """

    def __init__(self, text: str, entry: _Entry) -> None:
        self._text = text
        self._entry = entry
        self._replaces_itself = False
        key = text[entry.key.start_mark.index]
        self._quote = key if key in "\"'" else ""
        self._dash = "-" if "-" in entry.key.value or "_" not in entry.key.value else "_"

    def carry_out(self, targets: Mapping[str, str]) -> str | None:
        """Return the text with the entry replaced by the targets, or None if that is not possible."""
        entry = self._entry
        if targets and shorthand_of(entry.name) is not None:
            (target,) = targets
            if tuple(target.split("."))[:-1] == entry.path[:-1] and self._find(target.split(".")) is None:
                return self._replaced(entry.key, self._name(target.rpartition(".")[2], len(entry.path)))
        if targets.keys() == {entry.name}:
            return self._replaced(entry.value, targets[entry.name])
        if any("\n" in value for value in targets.values()):
            return None
        edits = [self._put(tuple(target.split(".")), value) for target, value in targets.items()]
        if not self._replaces_itself:
            edits.append(self._removal())
        text = self._text
        for start, end, new in sorted(edits, reverse=True):
            text = text[:start] + new + text[end:]
        return text

    def _name(self, name: str, depth: int) -> str:
        """Return a name with dashes or underscores like the replaced one; with underscores inside blocks."""
        name = name.replace("_", self._dash) if depth == 1 else name
        return f"{self._quote}{name}{self._quote}"

    def _find(self, path: Sequence[str]) -> _Entry | None:
        return next((each for each in _entries(_tree(self._text), ()) if each.path == tuple(path)), None)

    def _replaced(self, node: yaml.Node, new: str) -> str:
        return self._text[: node.start_mark.index] + new + self._text[node.end_mark.index :]

    def _put(self, path: _Names, value: str) -> tuple[int, int, str]:
        """Return the edit that sets a parameter: at its own entry, in its block, or in a new block."""
        own = self._find(path)
        if own is not None:
            return own.value.start_mark.index, own.value.end_mark.index, value
        for depth in range(len(path) - 1, 0, -1):
            block = self._find(path[:depth])
            if block is not None:
                return self._put_into(block, self._nested(path[depth:], value, depth + 1))
        return self._put_outside(self._nested(path, value, 1))

    def _nested(self, path: _Names, value: str, depth: int) -> str:
        for place in range(len(path) - 1, 0, -1):
            value = f"{{{self._name(path[place], depth + place)}: {value}}}"
        return f"{self._name(path[0], depth)}: {value}"

    def _put_into(self, block: _Entry, pair: str) -> tuple[int, int, str]:
        node = block.value
        if isinstance(node, yaml.MappingNode) and node.value:
            if len(node.value) == 1 and node.value[0][0].start_mark.index == self._entry.key.start_mark.index:
                self._replaces_itself = True
                return self._entry.key.start_mark.index, self._entry.value.end_mark.index, pair
            return self._before(node, node.value[0][0], pair)
        self._replaces_itself |= block.path == self._entry.path
        start, end = node.start_mark.index, node.end_mark.index
        space = " " if self._text[start - 1] == ":" else ""
        return start, end, f"{space}{{{pair}}}"

    def _put_outside(self, pair: str) -> tuple[int, int, str]:
        """Return the edit for a new top-level name: in place of the entry, or before the block around it."""
        entry = self._entry
        if len(entry.path) == 1 and not self._replaces_itself:
            self._replaces_itself = True
            return entry.key.start_mark.index, entry.value.end_mark.index, pair
        outer = self._find(entry.path[:1])
        if outer is None:
            raise ConfigError(f"{entry.name} was not found in the file")
        return self._before(outer.mapping, outer.key, pair)

    def _before(self, mapping: yaml.MappingNode, key: yaml.Node, pair: str) -> tuple[int, int, str]:
        start = key.start_mark.index
        indent = self._text[self._text.rfind("\n", 0, start) + 1 : start]
        comma = "," if mapping.flow_style else ""
        gap = "\n" + indent if not indent.strip() else " "
        return start, start, f"{pair}{comma}{gap}"

    def _removal(self) -> tuple[int, int, str]:
        """Return the edit that removes the entry; a comment next to it is kept."""
        start, end = self._entry.key.start_mark.index, self._entry.value.end_mark.index
        rest = self._text[end:].lstrip()
        before = self._text[:start].rstrip(" ")
        if self._entry.mapping.flow_style and rest.startswith(","):
            end = self._text.index(",", end) + 1
        elif self._entry.mapping.flow_style and before.endswith(","):
            start = len(before) - 1
        end += len(self._text[end:]) - len(self._text[end:].lstrip(" "))
        line_start = self._text.rfind("\n", 0, start) + 1
        line_end = self._text.find("\n", end) + 1 or len(self._text)
        is_alone = not self._text[line_start:start].strip() and not self._text[end:line_end].strip()
        return (line_start, line_end, "") if is_alone else (start, end, "")
