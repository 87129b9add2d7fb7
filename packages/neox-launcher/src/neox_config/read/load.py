"""Load a checked configuration from files and the command line, or report everything that is wrong."""

import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import SecretStr, ValidationError
from pydantic_core import ErrorDetails

from neox_config.derive.implied import fill_in, implied_settings
from neox_config.derive.unused import unused_values
from neox_config.errors import ConfigError
from neox_config.problems import (
    Place,
    Problem,
    closest,
    config_error,
    in_words,
    place_of,
)
from neox_config.read.aliases import (
    COMPUTED,
    EXTRA_BLOCK,
    FOREIGN_NAMES,
    OLDER_SPELLINGS,
    RETIRED,
    SHORTHANDS,
    fold_aliases,
)
from neox_config.read.features import missing_features, names_of_features
from neox_config.read.reading import Leaf, Reading, Text, add_text, normal_name, read_files, read_override
from neox_config.read.wording import homes_of, sentence_about, written_elsewhere
from neox_config.rules import broken_rules
from neox_config.schema.config import (
    NeoXConfig,
    all_parameters,
    build_section,
    parameter_named,
    section_of,
    sections,
)
from neox_config.schema.parameter import Section, entry_section, inner_section, scalars_of
from neox_config.schema.paths import PathError, expand_paths, is_path
from neox_config.schema.scalars import QUOTE, WORDS

__all__ = ["Draft", "draft_config", "is_valid_setting", "load_config"]

_INSTEAD_OF_EMPTY = (
    "write a configuration, copy one from configs, or make one for your texts: neox-launch init --data FOLDER"
)
# Number of unknown names for which a similar name is searched.
_MOST_SUGGESTIONS = 100
# Names that users may choose for groups and metrics. Dots are excluded because they separate nested names.
_CHOSEN_NAME = re.compile(r"\w{1,100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What could be read of a configuration.

    Args:
        config: if there are problems, reading a value that one of them names raises InvalidValue.
        problems: everything that is wrong.
        is_complete: whether all files could be read.
    """

    config: NeoXConfig
    problems: tuple[Problem, ...]
    is_complete: bool


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
        paths: YAML files, as for `draft_config`.
        overrides: `name=value` settings, as there.
        resume_overrides: settings of `--resume-set`, as there.
        directory: directory that the paths are relative to.
        texts: further YAML, as for `draft_config`.

    Raises:
        ConfigError: The configuration is invalid; the message lists every problem.
    """
    draft = draft_config(
        paths, overrides=overrides, resume_overrides=resume_overrides, directory=directory, texts=texts
    )
    if draft.problems:
        raise config_error(draft.problems, draft.config.files)
    return draft.config


def draft_config(
    paths: Sequence[str | Path],
    *,
    overrides: Iterable[str] = (),
    resume_overrides: Iterable[str] = (),
    directory: str | Path | None = None,
    texts: Sequence[Text] = (),
) -> Draft:
    """Read the configuration given by files and overrides as far as possible.

    Args:
        paths: YAML files, with or without `.yml`; their values are merged.
        overrides: `name=value` settings that override the files; nested names are dotted.
        resume_overrides: settings of `--resume-set`, which also override `overrides`.
        directory: directory that the paths are relative to.
        texts: YAML that is not in a file, for programs.

    Raises:
        ConfigError: A file is given twice.
    """
    reading = read_files(paths, directory)
    _refuse_repeated(paths, reading.files)
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
    leaves, missing = missing_features(_not_overridden(reading.leaves))
    unfolded = fold_aliases(leaves)
    problems = reading.problems + missing + unfolded.problems
    # Rules would report what is wrong with a model that this project does not build.
    assembly = _Assembly(problems, is_complete=reading.is_complete and not missing)
    repeated: list[Problem] = []
    different: list[tuple[Leaf, Leaf]] = []
    for leaf in _merge(unfolded.leaves, different, repeated):
        assembly.put(leaf)
    problems += _disagreements(different, written={leaf.place: leaf.value for leaf in reading.leaves})
    config, notices = assembly.build(), (*unfolded.notices, *repeated, *assembly.notices)
    if problems:
        refused = [*(problem.name for problem in problems), *(leaf.name for leaf, _ in different)]
        config = _without_refused(config, refused)
    else:
        config, implied = implied_settings(config, assembly.places)
        notices = (*notices, *implied, *unused_values(config, assembly.places))
    config = config.with_origin(sources=assembly.places, notices=notices, files=tuple(reading.files))
    return Draft(config=config, problems=tuple(problems), is_complete=assembly.is_complete)


def _refuse_repeated(paths: Sequence[str | Path], files: Sequence[str]) -> None:
    """Refuse a file that is given twice, such as a word that was meant as a command and names a file.

    Args:
        paths: the files as they are given.
        files: the same, as they were found.
    """
    first: dict[str, str] = {}
    for path, file in zip(map(str, paths), files, strict=True):
        real = os.path.realpath(file)
        if real in first and os.path.isfile(real):
            both = f"{first[real]} and {path} are the same configuration file"
            what = both if path != first[real] else f"the configuration file {path} is given twice"
            raise ConfigError(f"{what}; give it once")
        first[real] = path


def _without_refused(config: NeoXConfig, names: Iterable[str]) -> NeoXConfig:
    """Return the configuration without the values of some parameters; other names are left out of account."""
    built = {name: getattr(config, name) for name in sections()}
    for name in names:
        path = name.split(".")
        with suppress(KeyError):  # Not a parameter.
            section = section_of(path[0])
            built[section] = _without_value(built[section], path)
    return NeoXConfig.model_construct(**built)


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


def _merge(leaves: Sequence[Leaf], different: list[tuple[Leaf, Leaf]], notices: list[Problem]) -> list[Leaf]:
    """Return one leaf per name, with the highest precedence.

    `different` receives different values of files. On the command line the last one is used, with a notice,
    so that a command can be repeated with another value at its end.
    """
    by_name: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        by_name.setdefault(leaf.name, []).append(leaf)
    merged = []
    for found in by_name.values():
        strongest = max(leaf.place.precedence for leaf in found)
        candidates = [leaf for leaf in found if leaf.place.precedence == strongest]
        if strongest:
            *earlier, used = candidates
            notices += [_replaced(used, other) for other in earlier if not _equal(other.value, used.value)]
        else:
            used, *others = candidates
            different += [(used, other) for other in others if not _equal(other.value, used.value)]
        merged.append(used)
    return merged


def _equal(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _replaced(used: Leaf, earlier: Leaf) -> Problem:
    what = f"is used: it is given after {earlier.place.spelling}={_shown(used.name, earlier.value)}"
    return Problem(used.name, what, "", value=_shown(used.name, used.value), place=used.place)


def _is_secret(name: str) -> bool:
    with suppress(KeyError):
        return parameter_named(name).type == WORDS[SecretStr]
    return False


def _shown(name: str, value: Any) -> str:
    """Return a value for a message, which may be kept in a log: without secrets."""
    return "(hidden)" if _is_secret(name) else in_words(value)


def _disagreements(different: Sequence[tuple[Leaf, Leaf]], *, written: Mapping[Place, Any]) -> list[Problem]:
    """Return one problem for each two files that give parameters different values.

    Args:
        different: values of the same parameter, after older spellings were translated.
        written: values as they were written.
    """
    by_files: dict[tuple[str, str], list[tuple[Leaf, Leaf]]] = {}
    for first, other in different:
        by_files.setdefault((first.place.file, other.place.file), []).append((first, other))
    return [_disagreement(found, written) for found in by_files.values()]


def _disagreement(different: Sequence[tuple[Leaf, Leaf]], written: Mapping[Place, Any]) -> Problem:
    def value(leaf: Leaf) -> str:
        return _shown(leaf.name, written.get(leaf.place, leaf.value))

    found = (_valid_setting(other, first) for first, other in different)
    settings = [setting for setting in found if setting is not None]
    can_replace = len(settings) == len(different) and not any(
        _is_secret(first.name) for first, _ in different
    )
    replacing = f", or replace both with {_overriding(different, settings)}" if can_replace else ""
    (first, other), *more = different
    if not more:
        return Problem(
            other.name,
            f"has a different value in {first.place}, as {first.place.spelling}: {value(first)}",
            f"keep only one of them{replacing}",
            value=value(other),
            place=other.place,
        )
    elsewhere = "other lines" if first.place.file == other.place.file else first.place.file
    what = f"gives {len(different)} parameters other values than {elsewhere}:"
    rows = (_row(first, other, value) for first, other in different)
    return Problem(
        "",
        "\n".join([what, *rows]),
        f"keep only one of each{replacing}",
        place=Place(other.place.file),
    )


def _overriding(different: Sequence[tuple[Leaf, Leaf]], settings: Iterable[tuple[str, Any]]) -> str:
    """Return how to override values: as options, or in Python, where dictionaries are given."""
    if any(leaf.place.line is None for found in different for leaf in found):
        return f"overrides={dict(settings)}"
    options = (f"{name}={in_words(value, whole=True)}" for name, value in settings)
    return " ".join(f"--set {shlex.quote(option)}" for option in options)


def _row(first: Leaf, other: Leaf, value: Callable[[Leaf], str]) -> str:
    here, there = ("" if leaf.place.line is None else f"line {leaf.place.line}" for leaf in (other, first))
    return f"{here}  {other.place.spelling}: {value(other)} (there {there}: {value(first)})".strip()


def _valid_setting(*leaves: Leaf) -> tuple[str, Any] | None:
    """Return name and value of the first that is valid alone; None if none is."""
    for leaf in leaves:
        assembly = _Assembly([], is_complete=False)
        assembly.put(leaf)
        assembly.build()
        if not assembly.problems:
            is_older = normal_name(leaf.place.spelling) in OLDER_SPELLINGS
            return (leaf.name if is_older else leaf.place.spelling or leaf.name), leaf.value
    return None


def is_valid_setting(text: str) -> bool:
    """Return whether `name=value` of the command line is valid by itself, without rules on other values."""
    reading = Reading()
    read_override(text, reading)
    unfolded = fold_aliases(reading.leaves)
    assembly = _Assembly([*reading.problems, *unfolded.problems], is_complete=False)
    for leaf in unfolded.leaves:
        assembly.put(leaf)
    assembly.build()
    return not assembly.problems


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
            self._no_entry(leaf, entry)
        else:
            if leaf.value is not None or _takes_none(declared.annotation):
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

    def _no_entry(self, leaf: Leaf, kind: type[Section]) -> None:
        if leaf.value is None or leaf.value == {}:
            return
        some = next(iter(kind.model_fields))
        self._complain(
            leaf, "must be a mapping of named blocks", f"write {leaf.path[-1]}: {{NAME: {{{some}: ...}}}}"
        )

    def build(self) -> NeoXConfig:
        """Return the configuration, without the values that are invalid; `problems` receives the errors."""
        filled = fill_in(self.values)
        built: dict[str, Section] = {}
        for name, kind in sections().items():
            _open_required_blocks(kind, self.values[name])
            built[name] = self._validate(kind, self.values[name], filled)
        config = NeoXConfig.model_construct(**built)  # type: ignore[arg-type]
        config = _without_refused(config, self.meant - self.places.keys())
        if self.is_complete:
            placed = config.with_origin(sources=self.places, notices=(), files=())
            self.problems += broken_rules(placed, self.places)
        return config

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
        if remedy == QUOTE and place is not None and value is not None:
            remedy += place.within_quotes_of_shell(value)
        return Problem(name, what, remedy, value=value, place=place)

    def _whole_block(self, leaf: Leaf, kind: type[Section]) -> None:
        if leaf.value is None or leaf.value == {}:
            self._note_on_empty_block(leaf, kind)
            return
        some = ", ".join(f"{name}: ..." for name in list(kind.model_fields)[:2])
        if isinstance(leaf.value, bool) and "enabled" in kind.model_fields:
            some = f"enabled: {in_words(leaf.value)}"
        elif isinstance(leaf.value, str) and "type" in kind.model_fields:
            some = f"type: {in_words(leaf.value)}, params: ..."
        remedy = f"write {leaf.path[-1]}: {{{some}}}"
        if leaf.value is True and leaf.name in ("bf16", "fp16"):
            # A block beside a given precision would contradict it.
            is_option = leaf.place.precedence > 0
            remedy = f"write {f'--set precision={leaf.name}' if is_option else f'precision: {leaf.name}'}"
        self._complain(leaf, "must be a block of parameters", remedy)

    def _note_on_empty_block(self, leaf: Leaf, kind: type[Section]) -> None:
        """Note that the name of a block on the command line removes nothing; in files it is usual."""
        if not leaf.place.precedence:
            return
        some = "enabled=false" if "enabled" in kind.model_fields else f"{next(iter(kind.model_fields))}=VALUE"
        what = f"has no effect: {in_words(leaf.value)} leaves the block as the files and the defaults set it"
        remedy = f"set its parameters one by one, such as --set {leaf.name}.{some}"
        self.notices.append(Problem(leaf.name, what, remedy, value=in_words(leaf.value), place=leaf.place))

    def _unknown(self, leaf: Leaf, names: Sequence[str], *, dashes: bool) -> None:
        """Report an unknown name; `dashes` is True for names outside all blocks."""
        name = leaf.path[0] if dashes else leaf.path[-1]
        homes = [] if name in names else homes_of(leaf.path, is_outside=dashes)
        remedy = written_elsewhere(leaf.path, leaf.value, homes, is_outside=dashes)
        self.unknown += 1
        # In a file of another kind, every name is unknown, and similar names mean nothing.
        near = None if remedy or self.unknown > _MOST_SUGGESTIONS else closest(name, names)
        if near is not None:
            remedy = f"did you mean {near.replace('_', '-') if dashes else near}?"
        self.meant.update(_meant(leaf, near, homes, is_outside=dashes))
        searched = name if re.fullmatch(r"\w{1,40}", name) else "WORD"
        if not remedy and not dashes:
            remedy = f"use one of: {', '.join(names)}"
        self._complain(
            leaf, "is not a parameter", remedy or f"search for one: neox-config explain {searched}"
        )

    def _complain(self, leaf: Leaf, what: str, remedy: str = "") -> None:
        self.problems.append(Problem(leaf.name, what, remedy, value=in_words(leaf.value), place=leaf.place))


def _meant(leaf: Leaf, near: str | None, homes: Sequence[str], *, is_outside: bool) -> Sequence[str]:
    """Return the parameters that an unknown name stands for: of this meaning, this spelling, or in blocks."""
    if is_outside and leaf.path[0] in FOREIGN_NAMES:
        return [FOREIGN_NAMES[leaf.path[0]]]
    if near is None:
        return homes
    path = [SHORTHANDS.get(near, near), *leaf.path[1:]] if is_outside else [*leaf.path[:-1], near]
    return [".".join(path)]


@cache
def _all_names() -> list[str]:
    names = [parameter.name for parameter in all_parameters()]
    names += [*SHORTHANDS, *OLDER_SPELLINGS, *COMPUTED, *RETIRED, *names_of_features(), EXTRA_BLOCK]
    return [name for name in names if "." not in name]


def _takes_none(annotation: Any) -> bool:
    return type(None) in getattr(annotation, "__args__", ())


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
        holder: Any = section
        for part in path[:-1]:
            holder = getattr(holder, part)
        holder.__dict__.pop(path[-1], None)
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
