"""From files and command line to a checked configuration, or to the list of all that is wrong with it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from neox_launcher.config.aliases import COMPUTED, OLDER_SPELLINGS, RETIRED, SHORTHANDS, fold_aliases
from neox_launcher.config.implied import fill_in, implied_settings
from neox_launcher.config.parameter import Section, entry_section, inner_section
from neox_launcher.config.problems import (
    Place,
    Problem,
    config_error,
    did_you_mean,
    in_words,
    place_of,
)
from neox_launcher.config.reading import Leaf, read_files, read_override
from neox_launcher.config.rules import broken_rules
from neox_launcher.config.schema import (
    NeoXConfig,
    all_parameters,
    build_section,
    section_of,
    sections,
)
from neox_launcher.config.unused import unused_values
from neox_launcher.config.wording import homes_of, sentence_about, written_elsewhere

__all__ = ["load_config"]

# What a user may call a group or a metric: a name with dots could not be told from a path.
_CHOSEN_NAME = re.compile(r"\w{1,100}")


def load_config(
    paths: Sequence[str | Path],
    *,
    overrides: Iterable[str] = (),
    resume_overrides: Iterable[str] = (),
    directory: str | Path | None = None,
) -> NeoXConfig:
    """The configuration that files and overrides say together.

    Args:
        paths: YAML files, with or without `.yml`; their values are merged.
        overrides: `name=value`, each winning over the files; nested names are dotted.
        resume_overrides: the same from `--resume-set`; each wins over `overrides`, too.
        directory: folder that the paths are relative to.

    Raises:
        ConfigError: with every problem found.
    """
    reading = read_files(paths, directory)
    for text in overrides:
        read_override(text, reading)
    for text in resume_overrides:
        read_override(text, reading, option="--resume-set", precedence=2)
    unfolded = fold_aliases(reading.leaves)
    problems = reading.problems + unfolded.problems
    assembly = _Assembly(problems, is_complete=reading.is_complete)
    for leaf in _merge(unfolded.leaves, problems):
        assembly.put(leaf)
    config = assembly.build()
    if config is None:
        raise config_error(problems, reading.files)
    config, notices = implied_settings(config, assembly.places)
    notices += unused_values(config, assembly.places)
    return config.with_origin(
        sources=assembly.places, notices=(*unfolded.notices, *notices), files=tuple(reading.files)
    )


def _merge(leaves: Sequence[Leaf], problems: list[Problem]) -> list[Leaf]:
    """One leaf per name; the command line wins, and values of one precedence that disagree are a problem."""
    by_name: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        by_name.setdefault(leaf.name, []).append(leaf)
    merged = []
    for name, found in by_name.items():
        strongest = max(leaf.place.precedence for leaf in found)
        candidates = [leaf for leaf in found if leaf.place.precedence == strongest]
        first = candidates[0]
        merged.append(first)
        for other in candidates[1:]:
            if not _equal(other.value, first.value):
                problems.append(_disagreement(name, first, other))
    return merged


def _equal(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _disagreement(name: str, first: Leaf, other: Leaf) -> Problem:
    where = f"{first.place}, as {first.place.spelling}: {in_words(first.value)}"
    return Problem(
        name,
        f"is given another value in {where}",
        "keep one of them",
        value=in_words(other.value),
        place=other.place,
    )


@dataclass
class _Assembly:
    """Values on their way into the sections.

    Args:
        problems: receives what is wrong.
        is_complete: all files could be read; otherwise nothing is called missing, and no rule is asked.
        values: by section, as given.
        places: where they were written.
        wrong: names of values that are wrong by themselves.
        misplaced: names of parameters that were written outside their blocks, and are not missing.
    """

    problems: list[Problem]
    is_complete: bool
    values: dict[str, dict[str, Any]] = field(default_factory=lambda: {name: {} for name in sections()})
    places: dict[str, Place] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    misplaced: set[str] = field(default_factory=set)

    def put(self, leaf: Leaf) -> None:
        """Find the leaf's home, or say that it has none."""
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
            self._unknown(leaf, kind.model_fields, dashes=False)
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
            self._complain(leaf, f"is not possible: {outer} is no block of parameters")
        elif inner is not None:
            self._whole_block(leaf, inner)
        elif entry is not None:
            self._no_entry(leaf, entry)
        else:
            if leaf.value is not None or _takes_none(declared.annotation):
                at[part] = leaf.value
            self.places[leaf.name] = leaf.place

    def _put_entry(self, leaf: Leaf, path: tuple[str, ...], at: dict[str, Any], kind: type[Section]) -> None:
        """Set a value below a name that the user chose."""
        name, *rest = path
        if not _CHOSEN_NAME.fullmatch(name):
            self._complain(leaf, f"has {name!r} as a name", "use up to 100 letters, digits and underscores")
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
            leaf, "is a block of named blocks", f"write {leaf.path[-1]}: {{NAME: {{{some}: ...}}}}"
        )

    def build(self) -> NeoXConfig | None:
        """The configuration, or None when something is wrong; `problems` says what."""
        filled = fill_in(self.values)
        built: dict[str, Section] = {}
        for name, kind in sections().items():
            _open_required_blocks(kind, self.values[name])
            built[name] = self._validate(kind, self.values[name], filled)
        config = NeoXConfig.model_construct(**built)  # type: ignore[arg-type]
        if self.is_complete:
            self.problems += broken_rules(config, self.places, is_partial=bool(self.wrong))
        return None if self.problems else config

    def _validate(self, kind: type[Section], values: dict[str, Any], filled: set[str]) -> Section:
        try:
            return build_section(kind, values)
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=True)
        wrong: dict[tuple[str, ...], ErrorDetails] = {}
        for detail in details:
            wrong.setdefault(_field_path(kind, detail["loc"]), detail)
        for path, detail in wrong.items():
            name = ".".join(path)
            self.wrong.add(name)
            is_told = detail["type"] == "missing" and (name in self.misplaced or not self.is_complete)
            if name not in filled and not is_told:
                self.problems.append(self._finding(name, detail))
        return _without(kind, values, sorted({_removable(kind, path) for path in wrong}))

    def _finding(self, name: str, detail: ErrorDetails) -> Problem:
        what, remedy = sentence_about(name, detail)
        place = place_of(self.places, name)
        value = None if detail["type"] == "missing" else in_words(_given(self.values, name))
        return Problem(name, what, remedy, value=value, place=place)

    def _whole_block(self, leaf: Leaf, kind: type[Section]) -> None:
        if leaf.value is None or leaf.value == {}:
            return
        some = ", ".join(f"{name}: ..." for name in list(kind.model_fields)[:2])
        if isinstance(leaf.value, bool) and "enabled" in kind.model_fields:
            some = f"enabled: {in_words(leaf.value)}"
        elif isinstance(leaf.value, str) and "type" in kind.model_fields:
            some = f"type: {in_words(leaf.value)}, params: ..."
        self._complain(leaf, "is a block of parameters", f"write {leaf.path[-1]}: {{{some}}}")

    def _unknown(self, leaf: Leaf, names: Iterable[str], *, dashes: bool) -> None:
        """Complain about a name; `dashes` when it stands outside all blocks."""
        names = list(names)
        name = leaf.path[0] if dashes else leaf.path[-1]
        inside = [] if name in names else homes_of(leaf.path, is_outside=dashes)
        self.misplaced.update(inside)
        remedy = written_elsewhere(leaf.path, inside, is_outside=dashes)
        remedy = remedy or did_you_mean(name, names, dashes=dashes)
        if not remedy and not dashes:
            remedy = f"possible here: {', '.join(names)}"
        self._complain(leaf, "is not a parameter", remedy or "neox-config docs lists all parameters")

    def _complain(self, leaf: Leaf, what: str, remedy: str = "") -> None:
        self.problems.append(Problem(leaf.name, what, remedy, value=in_words(leaf.value), place=leaf.place))


def _all_names() -> list[str]:
    names = [parameter.name for parameter in all_parameters()]
    return [name for name in (*names, *SHORTHANDS, *OLDER_SPELLINGS, *COMPUTED, *RETIRED) if "." not in name]


def _takes_none(annotation: Any) -> bool:
    return type(None) in getattr(annotation, "__args__", ())


def _takes_any_name(annotation: Any) -> bool:
    """Whether the user chooses the names below, and each names a plain value."""
    kinds = (annotation, *getattr(annotation, "__args__", ()))
    return any(get_origin(kind) is dict and get_args(kind)[1] in (Any, str) for kind in kinds)


def _put_below(at: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set a value in nested dicts; what stands in the way of a deeper name is replaced."""
    for part in path[:-1]:
        inner = at.get(part)
        at[part] = inner if isinstance(inner, dict) else {}
        at = at[part]
    at[path[-1]] = value


def _open_required_blocks(kind: type[Section], values: dict[str, Any]) -> None:
    """Empty dicts for blocks without a default, so that what is missing is the parameter inside."""
    for name, declared in kind.model_fields.items():
        inner, entry = inner_section(declared), entry_section(declared)
        if inner is not None and (declared.is_required() or name in values):
            _open_required_blocks(inner, values.setdefault(name, {}))
        if entry is not None:
            for each in values.get(name, {}).values():
                _open_required_blocks(entry, each)


def _field_path(kind: type[Section], location: tuple[int | str, ...]) -> tuple[str, ...]:
    """The names of a pydantic location that lead to a parameter; list places and union tags are cut off."""
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
    """The path of the field to remove for a wrong value: named blocks are removed together."""
    inner: type[Section] | None = kind
    for depth, part in enumerate(path):
        declared = inner.model_fields[part] if inner is not None else None
        if declared is None or entry_section(declared) is not None:
            return path[: depth + 1]
        inner = inner_section(declared)
    return path


def _without(kind: type[Section], values: Mapping[str, Any], wrong: Sequence[tuple[str, ...]]) -> Section:
    """The section without its wrong fields: reading one of them raises AttributeError."""
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
    """The values without wrong ones, with 1 where something must stand (all such fields are numbers)."""
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
