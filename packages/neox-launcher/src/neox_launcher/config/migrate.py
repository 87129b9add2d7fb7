"""Rewriting a file's shorthands and older spellings as the parameters they stand for.

The text is edited where the names stand, one name at a time, so that comments, order and formatting stay.
At the end both texts must say the same; otherwise nothing is changed.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from neox_launcher.config.aliases import OLDER_SPELLINGS, SHORTHANDS, fold_aliases
from neox_launcher.config.problems import config_error
from neox_launcher.config.reading import Leaf, compose, normal_name, read_files, read_text, text_of
from neox_launcher.errors import ConfigError

__all__ = ["Migrated", "migrate_file", "migrate_text", "replace_file"]

_Names = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrated:
    """A file with its names rewritten.

    Args:
        path: where it was read from.
        text: what it should hold.
        changes: a line for each name that was rewritten.
    """

    path: Path
    text: str
    changes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A name and its value in a file, and the mapping that they stand in."""

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


def migrate_file(path: str | Path) -> Migrated:
    """The text of a file without shorthands and older spellings.

    Raises:
        ConfigError: the file cannot be read, contradicts itself, or cannot be rewritten by a program.
    """
    reading = read_files([path], None)
    if reading.problems:
        raise config_error(reading.problems, reading.files)
    found = Path(reading.files[0])
    text, changes = migrate_text(text_of(found), str(found))
    return Migrated(path=found, text=text, changes=tuple(changes))


def replace_file(migrated: Migrated) -> None:
    """Put the new text into the file's place, whole or not at all."""
    target = migrated.path.resolve()
    aside = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        aside.write_text(migrated.text, encoding="utf-8", newline="")
        shutil.copymode(target, aside)
        aside.replace(target)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise ConfigError(
            f"{target} cannot be replaced: {error}; write the printed text elsewhere"
        ) from error


def migrate_text(text: str, file: str) -> tuple[str, list[str]]:
    """A text with its names rewritten, and a line for each.

    Raises:
        ConfigError: as `migrate_file`.
    """
    meant = _meaning(text, file)
    changes: list[str] = []
    given_up: set[_Names] = set()
    while (step := _next_step(text, given_up)) is not None:
        entry, targets = step
        changed = _Edit(text, entry).carry_out(targets)
        if changed is None or not _is_yaml(changed):
            given_up.add(entry.path)
            continue
        text = changed
        changes.append(f"{entry.name} -> {', '.join(targets) or 'left out: it says nothing'}")
    if _meaning(text, file) != meant:
        raise ConfigError(f"{file}: cannot be rewritten without changing what it says; rename by hand")
    return text, changes


def _meaning(text: str, file: str) -> dict[str, Any]:
    """What a text says once every name is a parameter's own; empty blocks say nothing."""
    leaves, problems = read_text(text, file)
    unfolded = fold_aliases(leaves)
    if problems or unfolded.problems:
        raise config_error([*problems, *unfolded.problems], [file])
    found: dict[str, Any] = {}
    for leaf in unfolded.leaves:
        if found.setdefault(leaf.name, leaf.value) != leaf.value:
            raise ConfigError(f"{file}: gives {leaf.name} two values; see neox-config check {file}")
    return {name: value for name, value in found.items() if value is not None and value != {}}


def _is_yaml(text: str) -> bool:
    try:
        compose(text)
    except yaml.YAMLError:
        return False
    return True


def _next_step(text: str, given_up: set[_Names]) -> tuple[_Entry, Mapping[str, str]] | None:
    """The first name to rewrite, and its parameters with their values as text."""
    given = _given(read_text(text, "")[0])
    for entry in _entries(compose(text), ()):
        targets = None if entry.path in given_up else _targets(entry, text, given)
        if targets is not None:
            return entry, targets
    return None


def _given(leaves: Sequence[Leaf]) -> dict[str, Any]:
    return {leaf.name: leaf.value for leaf in leaves}


def _entries(node: yaml.Node | None, path: _Names) -> Iterator[_Entry]:
    """Every name below a node, outer names first."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value != "<<":
            inner = (*path, normal_name(key.value))
            yield _Entry(inner, key, value, node)
            yield from _entries(value, inner)


def _targets(entry: _Entry, text: str, given: Mapping[str, Any]) -> Mapping[str, str] | None:
    if entry.name in SHORTHANDS:
        return {SHORTHANDS[entry.name]: text[entry.value.start_mark.index : entry.value.end_mark.index]}
    if entry.name in OLDER_SPELLINGS and entry.name in given:
        found = OLDER_SPELLINGS[entry.name].translate(given[entry.name], given)
        return {name: json.dumps(value) for name, value in found.items()}
    return None


class _Edit:
    """One name's rewriting.

    Args:
        text: the whole file.
        entry: what is rewritten.
    """

    def __init__(self, text: str, entry: _Entry) -> None:
        self._text = text
        self._entry = entry
        self._replaces_itself = False
        key = text[entry.key.start_mark.index]
        self._quote = key if key in "\"'" else ""
        self._dash = "-" if "-" in entry.key.value or "_" not in entry.key.value else "_"

    def carry_out(self, targets: Mapping[str, str]) -> str | None:
        """The text with the targets in the entry's place; None where that is beyond a program."""
        entry = self._entry
        if entry.name in SHORTHANDS:
            (target,) = targets
            if tuple(target.split("."))[:-1] == entry.path[:-1] and self._find(target.split(".")) is None:
                return self._replaced(entry.key, self._name(target.rpartition(".")[2], len(entry.path)))
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
        """A name in the style of the one that is rewritten; inside blocks with underscores."""
        name = name.replace("_", self._dash) if depth == 1 else name
        return f"{self._quote}{name}{self._quote}"

    def _find(self, path: Sequence[str]) -> _Entry | None:
        return next((each for each in _entries(compose(self._text), ()) if each.path == tuple(path)), None)

    def _replaced(self, node: yaml.Node, new: str) -> str:
        return self._text[: node.start_mark.index] + new + self._text[node.end_mark.index :]

    def _put(self, path: _Names, value: str) -> tuple[int, int, str]:
        """The edit that gives a parameter a value: in its own place, its block, or a new block."""
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
        """A new top-level name: in the entry's own place, or before the block that holds the entry."""
        entry = self._entry
        if len(entry.path) == 1 and not self._replaces_itself:
            self._replaces_itself = True
            return entry.key.start_mark.index, entry.value.end_mark.index, pair
        outer = self._find(entry.path[:1])
        if outer is None:
            raise ConfigError(f"{entry.name} stands nowhere")
        return self._before(outer.mapping, outer.key, pair)

    def _before(self, mapping: yaml.MappingNode, key: yaml.Node, pair: str) -> tuple[int, int, str]:
        start = key.start_mark.index
        indent = self._text[self._text.rfind("\n", 0, start) + 1 : start]
        comma = "," if mapping.flow_style else ""
        gap = "\n" + indent if not indent.strip() else " "
        return start, start, f"{pair}{comma}{gap}"

    def _removal(self) -> tuple[int, int, str]:
        """The edit that takes the entry out; a comment beside it stays."""
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
