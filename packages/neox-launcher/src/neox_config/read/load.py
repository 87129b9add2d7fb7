"""Load a checked configuration from files and the command line, or report everything that is wrong."""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import SecretStr, ValidationError
from pydantic_core import ErrorDetails

from neox_config.derive.implied import fill_in, implied_settings
from neox_config.derive.unused import unused_values
from neox_config.names import answer
from neox_config.problems import (
    Place,
    Problem,
    closest,
    config_error,
    in_words,
    place_of,
)
from neox_config.read.aliases import accepted_names, fold_aliases, shorthand_of
from neox_config.read.reading import Leaf, Text, add_text, read_files, read_override
from neox_config.read.wording import homes_of, sentence_about, written_elsewhere
from neox_config.rules import broken_rules
from neox_config.schema.config import (
    NeoXConfig,
    all_parameters,
    build_section,
    field_named,
    section_of,
    sections,
)
from neox_config.schema.parameter import Section, entry_section, inner_section, scalars_of
from neox_config.schema.paths import PathError, expand_paths, is_path
from neox_config.schema.sections.mup import BaseShapes

__all__ = ["load_config"]

_INSTEAD_OF_EMPTY = (
    "write a configuration, copy one from configs, or make one for your texts: neox-launch init --data FOLDER"
)
# Number of unknown names for which a similar name is searched.
_MOST_SUGGESTIONS = 100
# Names that users may choose for groups and metrics. Dots are excluded because they separate nested names.
_CHOSEN_NAME = re.compile(r"\w{1,100}")


def load_config(
    paths: Sequence[str | Path],
    *,
    overrides: Iterable[str] = (),
    resume_overrides: Iterable[str] = (),
    directory: str | Path | None = None,
    texts: Sequence[Text] = (),
) -> NeoXConfig:
    """Load the configuration given by files and overrides.

    Args:
        paths: YAML files, with or without `.yml`; their values are merged.
        overrides: `name=value` settings that override the files; nested names are dotted.
        resume_overrides: settings of `--resume-set`, which also override `overrides`.
        directory: directory that the paths are relative to.
        texts: YAML that is not in a file, for programs.

    Raises:
        ConfigError: The configuration is invalid; the message lists every problem.
    """
    reading = read_files(paths, directory)
    for given in texts:
        add_text(given, reading)
    for text in overrides:
        read_override(text, reading)
    for text in resume_overrides:
        read_override(text, reading, option="--resume-set", precedence=2)
    if paths and not texts and not reading.leaves and not reading.problems:
        reading.problems += [
            Problem("", "is empty", _INSTEAD_OF_EMPTY, place=Place(file)) for file in reading.files
        ]
        reading.is_complete = False
    unfolded = fold_aliases(_not_overridden(reading.leaves))
    problems = reading.problems + unfolded.missing + unfolded.problems
    # Rules would report what is wrong with a model that this project does not build.
    assembly = _Assembly(problems, is_complete=reading.is_complete and not unfolded.missing)
    merged, repeated = _merge(unfolded.leaves, problems)
    for leaf in merged:
        assembly.put(leaf)
    config = assembly.build()
    if problems:
        raise config_error(problems, reading.files)
    config, implied = implied_settings(config, assembly.places)
    notices = (*unfolded.notices, *repeated, *assembly.notices, *implied)
    notices = (*notices, *unused_values(config, assembly.places))
    return config.with_origin(sources=assembly.places, notices=notices, files=tuple(reading.files))


def _without_value(section: Section, path: Sequence[str]) -> Section:
    first, *rest = path
    copy = section.model_copy()
    inner = copy.__dict__.get(first)
    if rest and isinstance(inner, Section):
        copy.__dict__[first] = _without_value(inner, rest)
    elif not rest:
        copy.__dict__.pop(first, None)
    return copy


def _not_overridden(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Return the leaves without those that have the same name as one of higher precedence."""
    strongest: dict[str, int] = {}
    for leaf in leaves:
        strongest[leaf.name] = max(leaf.place.precedence, strongest.get(leaf.name, 0))
    return [leaf for leaf in leaves if leaf.place.precedence == strongest[leaf.name]]


def _merge(leaves: Sequence[Leaf], problems: list[Problem]) -> tuple[list[Leaf], list[Problem]]:
    """Return one leaf per name, with the highest precedence, and notes; `problems` receives the errors.

    Files may not give different values. On the command line the last one is used, with a note, so that a
    command can be repeated with another value at its end.
    """
    by_name: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        by_name.setdefault(leaf.name, []).append(leaf)
    merged, notices = [], []
    for name, found in by_name.items():
        strongest = max(leaf.place.precedence for leaf in found)
        candidates = [leaf for leaf in found if leaf.place.precedence == strongest]
        used = candidates[-1 if strongest else 0]
        merged.append(used)
        for other in candidates:
            if _equal(other.value, used.value):
                continue
            shown, given = _shown(name, other.value), other.place.spelling
            if strongest:
                what = f"is used: it is given after {given}={shown}"
                notices.append(Problem(name, what, value=_shown(name, used.value), place=used.place))
            else:
                what = f"has a different value in {used.place}, as {used.place.spelling}: "
                what += _shown(name, used.value)
                remedy = "keep only one of them, or replace both with --set"
                problems.append(Problem(name, what, remedy, value=shown, place=other.place))
    return merged, notices


def _equal(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _shown(name: str, value: Any) -> str:
    """Return a value for a message, which may be kept in a log: without secrets."""
    declared = field_named(name)
    is_secret = declared is not None and SecretStr in (declared.annotation, *get_args(declared.annotation))
    return "(hidden)" if is_secret else in_words(value)


@dataclass
class _Assembly:
    """Values that are being sorted into sections.

    Args:
        problems: list that receives the errors.
        is_complete: True if all files could be read; otherwise missing parameters and rules are not checked.
        values: given values by section.
        places: location of each value.
        meant: parameters that unknown names stand for: they are not missing, but their values are not known.
        unknown: number of unknown names.
        notices: notes about values that are valid and do nothing.
    """

    problems: list[Problem]
    is_complete: bool
    values: dict[str, dict[str, Any]] = field(default_factory=lambda: {name: {} for name in sections()})
    places: dict[str, Place] = field(default_factory=dict)
    meant: set[str] = field(default_factory=set)
    unknown: int = 0
    notices: list[Problem] = field(default_factory=list)

    def put(self, leaf: Leaf) -> None:
        """Put a leaf into its section, or report that its name is unknown."""
        try:
            section = section_of(leaf.path[0])
        except KeyError:
            self._unknown(leaf, _all_names(), dashes=True)
            return
        self._put(leaf, leaf.path, self.values[section], sections()[section])

    def _put(self, leaf: Leaf, path: tuple[str, ...], at: dict[str, Any], kind: type[Section]) -> None:
        """Set the value at the rest of the leaf's path, below a block of parameters."""
        part, *rest = path
        declared = kind.model_fields.get(part)
        if declared is None and kind.model_config.get("extra") != "allow":
            self._unknown(leaf, list(kind.model_fields), dashes=False)
            return
        inner = None if declared is None else inner_section(declared)
        entry = None if declared is None else entry_section(declared)
        if declared is None or _takes_any_name(declared.annotation):
            _put_below(at, path, leaf.value)
            self.places[leaf.name] = leaf.place
        elif rest and inner is not None:
            self._put(leaf, tuple(rest), at.setdefault(part, {}), inner)
        elif rest and entry is not None:
            self._put_entry(leaf, tuple(rest), at.setdefault(part, {}), entry)
        elif rest:
            outer = ".".join(leaf.path[: len(leaf.path) - len(rest)])
            self._complain(
                leaf, f"is not a parameter: {outer} is not a block", f"give {outer} a single value"
            )
        elif inner is not None:
            self._whole_block(leaf, inner)
        elif entry is not None:
            self._whole_block(leaf, entry, is_named=True)
        else:
            if leaf.value is not None or type(None) in getattr(declared.annotation, "__args__", ()):
                # A section refuses 10.000 as a whole number, which 10.0 is.
                is_whole = {int, float, str}.intersection(scalars_of(kind, part)) == {int}
                at[part] = leaf.written if leaf.written and is_whole else leaf.value
                if is_path(declared):
                    at[part] = self._expanded(leaf)
            self.places[leaf.name] = leaf.place

    def _expanded(self, leaf: Leaf) -> Any:
        try:
            return expand_paths(leaf.value)
        except PathError as error:
            self._complain(leaf, error.what, error.remedy)
            return leaf.value

    def _put_entry(self, leaf: Leaf, path: tuple[str, ...], at: dict[str, Any], kind: type[Section]) -> None:
        """Set a value below a name chosen by the user."""
        name, *rest = path
        if not _CHOSEN_NAME.fullmatch(name):
            self._complain(
                leaf, f"contains the invalid name {name!r}", "use up to 100 letters, digits and underscores"
            )
        elif rest:
            self._put(leaf, tuple(rest), at.setdefault(name, {}), kind)
        elif leaf.value is None or leaf.value == {}:
            at.setdefault(name, {})
        else:
            self._whole_block(leaf, kind)

    def build(self) -> NeoXConfig:
        """Return the configuration, without the values that are invalid; `problems` receives the errors."""
        self._read_base_shapes(self.values["mup"])
        filled = fill_in(self.values)
        built: dict[str, Section] = {}
        for name, kind in sections().items():
            _open_required_blocks(kind, self.values[name])
            built[name] = self._validate(kind, self.values[name], filled)
        for path in (name.split(".") for name in self.meant - self.places.keys()):
            with suppress(KeyError):  # Not a parameter.
                section = section_of(path[0])
                built[section] = _without_value(built[section], path)
        config = NeoXConfig.model_construct(**built)  # type: ignore[arg-type]
        if self.is_complete:
            placed = config.with_origin(sources=self.places, notices=(), files=())
            self.problems += broken_rules(placed, self.places)
        return config

    def _read_base_shapes(self, mup: dict[str, Any]) -> None:
        """Fill in the sizes of the base model of muP from their file."""
        name, file = "base_shapes_file", mup.get("base_shapes_file")
        if file is None or mup.get("save_base_shapes") is True or mup.get("use_mup") is not True:
            return
        shapes = read_files([file], None)
        found = {leaf.name: leaf.value for leaf in shapes.leaves}
        what = shapes.problems[0].what if shapes.problems else None
        if what is None and not found.keys() <= BaseShapes.model_fields.keys():
            what = f"has names other than {', '.join(BaseShapes.model_fields)}"
        if what is None:
            mup["mup_base"] = found | mup.get("mup_base", {})
            return
        self.is_complete = False
        remedy = "write it with save-base-shapes: true and the configuration of the base model"
        self.problems.append(Problem(name, what, remedy, value=in_words(file), place=self.places.get(name)))

    def _validate(self, kind: type[Section], values: dict[str, Any], filled: set[str]) -> Section:
        try:
            return build_section(kind, values)
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=True)
        wrong: dict[tuple[str, ...], list[ErrorDetails]] = {}
        for detail in details:
            wrong.setdefault(_field_path(kind, detail["loc"]), []).append(detail)
        for path, found in wrong.items():
            name = ".".join(path)
            is_told = found[0]["type"] == "missing" and (name in self.meant or not self.is_complete)
            if name not in filled and not is_told:
                self.problems.append(self._finding(name, found))
        return _without(kind, values, sorted({_removable(kind, path) for path in wrong}))

    def _finding(self, name: str, details: Sequence[ErrorDetails]) -> Problem:
        what, remedy = sentence_about(name, details)
        # The names in a mapping have places of their own; the first one stands for the mapping.
        entries = (place for given, place in self.places.items() if given.startswith(f"{name}."))
        place = place_of(self.places, name) or next(entries, None)
        value = None if details[0]["type"] == "missing" else _shown(name, _given(self.values, name))
        return Problem(name, what, remedy, value=value, place=place)

    def _whole_block(self, leaf: Leaf, kind: type[Section], *, is_named: bool = False) -> None:
        """Report a value in place of a block; an empty one is noted on the command line, and usual in files.

        Args:
            leaf: the value.
            kind: section of the block.
            is_named: it is the section of the entries of the block, which have names.
        """
        first = "enabled" if "enabled" in kind.model_fields else next(iter(kind.model_fields))
        inside = f"NAME: {{{first}: ...}}" if is_named else f"{first}: ..."
        value = in_words(leaf.value)
        if leaf.value not in (None, {}):
            what, remedy = "must be a block of parameters", f"write {leaf.path[-1]}: {{{inside}}}"
            self._complain(leaf, what, remedy)
        elif leaf.place.precedence:
            what = f"has no effect: {value} leaves the block as the files and the defaults set it"
            inside = f"{'NAME.' if is_named else ''}{first}=VALUE"
            remedy = f"set its parameters one by one, such as --set {leaf.name}.{inside}"
            self.notices.append(Problem(leaf.name, what, remedy, value=value, place=leaf.place))

    def _unknown(self, leaf: Leaf, names: Sequence[str], *, dashes: bool) -> None:
        """Report an unknown name; `dashes` is True for names outside all blocks."""
        name = leaf.path[0] if dashes else leaf.path[-1]
        homes = [] if name in names else homes_of(leaf.path, is_outside=dashes)
        remedy = written_elsewhere(leaf.path, homes, is_outside=dashes)
        self.unknown += 1
        # In a file of another kind, every name is unknown, and similar names mean nothing.
        near = None if remedy or self.unknown > _MOST_SUGGESTIONS else closest(name, names)
        if near is not None:
            remedy = f"did you mean {near.replace('_', '-') if dashes else near}?"
        self.meant.update(_meant(leaf, near, homes, is_outside=dashes))
        search = "search for one: neox-config explain WORD"
        remedy = remedy or (search if dashes else f"use one of: {', '.join(names)}")
        self._complain(leaf, "is not a parameter", remedy)

    def _complain(self, leaf: Leaf, what: str, remedy: str = "") -> None:
        self.problems.append(Problem(leaf.name, what, remedy, value=in_words(leaf.value), place=leaf.place))


def _meant(leaf: Leaf, near: str | None, homes: Sequence[str], *, is_outside: bool) -> Sequence[str]:
    """Return the parameters that an unknown name stands for: of this meaning, this spelling, or in blocks."""
    found = answer(leaf.path[0]) if is_outside else None
    if found is not None:
        return found.parameters
    if near is None:
        return homes
    path = [shorthand_of(near) or near, *leaf.path[1:]] if is_outside else [*leaf.path[:-1], near]
    return [".".join(path)]


@cache
def _all_names() -> list[str]:
    names = [*(parameter.name for parameter in all_parameters()), *accepted_names()]
    return [name for name in names if "." not in name]


def _takes_any_name(annotation: Any) -> bool:
    """Return True if the user chooses the names below the parameter, each with a plain value."""
    kinds = (annotation, *getattr(annotation, "__args__", ()))
    return any(get_origin(kind) is dict and get_args(kind)[1] in (Any, str) for kind in kinds)


def _put_below(at: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set a value in nested dicts; values that are not dicts are replaced."""
    for part in path[:-1]:
        inner = at.get(part)
        at[part] = inner if isinstance(inner, dict) else {}
        at = at[part]
    at[path[-1]] = value


def _open_required_blocks(kind: type[Section], values: dict[str, Any]) -> None:
    """Add empty dicts for blocks without a default, so that the parameter inside is reported as missing."""
    for name, declared in kind.model_fields.items():
        inner, entry = inner_section(declared), entry_section(declared)
        if inner is not None and (declared.is_required() or name in values):
            _open_required_blocks(inner, values.setdefault(name, {}))
        if entry is not None:
            for each in values.get(name, {}).values():
                _open_required_blocks(entry, each)


def _field_path(kind: type[Section], location: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return the part of a pydantic location that names a parameter, without list indices and union tags."""
    path: list[str] = []
    inner: type[Section] | None = kind
    parts = iter(location)
    for part in parts:
        if inner is None or not isinstance(part, str) or part not in inner.model_fields:
            break
        path.append(part)
        declared = inner.model_fields[part]
        inner = inner_section(declared) or entry_section(declared)
        if entry_section(declared) is not None:
            path += [str(name) for name in [next(parts, None)] if name is not None]
    return tuple(path)


def _removable(kind: type[Section], path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the path of the field to remove for an invalid value; named blocks are removed together."""
    inner: type[Section] | None = kind
    for depth, part in enumerate(path):
        declared = inner.model_fields[part] if inner is not None else None
        if declared is None or entry_section(declared) is not None:
            return path[: depth + 1]
        inner = inner_section(declared)
    return path


def _without(kind: type[Section], values: Mapping[str, Any], wrong: Sequence[tuple[str, ...]]) -> Section:
    """Return the section without its invalid fields; reading one of them raises InvalidValue."""
    good = _pruned(kind, values, wrong)
    section = kind.model_validate(good)
    for path in wrong:
        section = _without_value(section, path)
    return section


def _pruned(
    kind: type[Section], values: Mapping[str, Any], wrong: Sequence[tuple[str, ...]]
) -> dict[str, Any]:
    """Return the values without invalid ones; required fields, which are all numbers, are set to 1."""
    good = dict(values)
    for name in {path[0] for path in wrong}:
        declared = kind.model_fields[name]
        inner = inner_section(declared)
        deeper = [path[1:] for path in wrong if path[0] == name and len(path) > 1]
        if inner is not None and deeper:
            good[name] = _pruned(inner, values.get(name, {}), deeper)
        elif declared.is_required():
            good[name] = 1
        else:
            good.pop(name, None)
    return good


def _given(values: Mapping[str, Mapping[str, Any]], name: str) -> Any:
    found: Any = values[section_of(name.partition(".")[0])]
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
