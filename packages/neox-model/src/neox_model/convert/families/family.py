"""The declaration of a family: one class of transformers, its tensors and its configuration.

One table serves both directions, so that they cannot disagree.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch

from neox_model.convert.architecture import Architecture
from neox_model.convert.errors import ConversionError
from neox_model.convert.families.values import CHECKS, layer_count
from neox_model.convert.forms import SAME, Form

__all__ = ["Entry", "Family", "Key", "Row", "Tensors", "lookup"]

_CHECKS: Mapping[str, Callable[[Any, str], Any]] = {
    each.name: CHECKS[each.type] for each in fields(Architecture) if each.type in CHECKS
} | {"num_layers": layer_count}
# A layer of ours is "layers.INDEX.PART".
_LAYER = "layers"


class Entry(Protocol):
    """One or several entries of their configuration that give one field of the architecture."""

    @property
    def field(self) -> str:
        """Return the field of `Architecture`."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the entries that are read and written."""

    def read(self, config: Mapping[str, Any]) -> Any:
        """Return the field's value."""

    def write(self, architecture: Architecture, config: dict[str, Any]) -> None:
        """Add the entries."""


def lookup(config: Mapping[str, Any], name: str) -> Any:
    """Return the entry with a dotted name; None if it is absent."""
    found: Any = config
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


@dataclass(frozen=True, slots=True)
class Key:
    """An entry that is the field itself, or its word for it.

    Args:
        theirs: name of the entry; a dot separates a name inside a block.
        field: field of `Architecture`.
        default: the value that transformers uses if the entry is absent or null; or a function of the
            configuration.
        words: their values -> ours; the first of several for one of ours is written.
    """

    theirs: str
    field: str
    default: Callable[[Mapping[str, Any]], Any] | Any = None
    words: Mapping[Any, Any] | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the entry."""
        return (self.theirs.partition(".")[0],)

    def read(self, config: Mapping[str, Any]) -> Any:
        """Return the field's value.

        Raises:
            ConversionError: the entry is missing, or has a value that we do not have.
        """
        value = lookup(config, self.theirs)
        if value is None:
            value = self.default(config) if callable(self.default) else self.default
        if value is None:
            raise ConversionError(f"config.json has no {self.theirs}; copy the folder again")
        if not self.words:
            return _CHECKS[self.field](value, self.theirs) if self.field in _CHECKS else value
        if value not in tuple(self.words):  # A list is no key of a dict.
            raise ConversionError(
                f"config.json has {self.theirs}: {value!r}, but only {', '.join(map(str, self.words))} can "
                "be converted"
            )
        return self.words[value]

    def write(self, architecture: Architecture, config: dict[str, Any]) -> None:
        """Add the entry, unless it has no word for our value."""
        value = getattr(architecture, self.field)
        if self.words:
            value = next((theirs for theirs, ours in self.words.items() if ours == value), None)
        *blocks, name = self.theirs.split(".")
        for block in blocks:
            config = config.setdefault(block, {})
        if value is not None:
            config[name] = value


@dataclass(frozen=True, slots=True)
class Row:
    """One module of ours and the modules of theirs that hold the same numbers.

    Args:
        ours: name in a layer, or in the model.
        theirs: names of theirs.
        form: how the tensors are transformed; weights and biases alike.
    """

    ours: str
    theirs: tuple[str, ...]
    form: Form = SAME


@dataclass(frozen=True, slots=True)
class Tensors:
    """One tensor of ours, and those of theirs that it becomes.

    Args:
        ours: logical name.
        shape: its whole shape.
        theirs: name -> shape.
        form: the transformation.
    """

    ours: str
    shape: tuple[int, ...]
    theirs: Mapping[str, tuple[int, ...]]
    form: Form


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One class of transformers.

    Args:
        name: `model_type`.
        class_name: the class.
        layer: prefix of a layer, with "{}" for its index.
        in_layer: the modules of a layer.
        outside: the other modules.
        entries: entries of the configuration; with `fixed` they give every field of the architecture.
        fixed: fields that always have one value.
        required: entries that must be absent or have one of these values.
        dropouts: our parameter -> theirs, None if the class has none; they do not change logits.
        other_names: names in files of other versions -> names in `outside`.
        base_prefix: prefix that files of the model without its head lack.
        ignored: endings of tensors in older files that are not weights.
    """

    name: str
    class_name: str
    layer: str
    in_layer: tuple[Row, ...]
    outside: tuple[Row, ...]
    entries: tuple[Entry, ...]
    fixed: Mapping[str, Any]
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    dropouts: Mapping[str, str] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)
    base_prefix: str = ""
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        stated = [*(entry.field for entry in self.entries), *self.fixed]
        expected = {each.name for each in fields(Architecture)}
        assert sorted(stated) == sorted(expected), set(stated) ^ expected

    def read(self, config: Mapping[str, Any]) -> Architecture:
        """Return the architecture of a configuration of this class.

        Raises:
            ConversionError: an entry is missing, or has a value that we do not have.
        """
        for name, allowed in self.required.items():
            value = lookup(config, name)
            if value is not None and value not in allowed:
                usable = f"only {' or '.join(map(str, allowed))}" if allowed else "only a model without it"
                raise ConversionError(
                    f"config.json has {name}: {value!r}, which neox-model does not have; {usable} can be "
                    "converted"
                )
        head_width = config.get("head_dim")
        architecture = Architecture(
            **{entry.field: entry.read(config) for entry in self.entries}, **self.fixed
        )
        if head_width not in (None, architecture.hidden_size // architecture.heads):
            raise ConversionError(
                f"config.json has head_dim: {head_width}, but the heads of neox-model have hidden-size / "
                f"num-attention-heads = {architecture.hidden_size // architecture.heads} channels"
            )
        return architecture

    def write(self, architecture: Architecture) -> dict[str, Any]:
        """Return the entries that give an architecture, as far as this class has it."""
        config: dict[str, Any] = {"architectures": [self.class_name], "model_type": self.name}
        for entry in self.entries:
            entry.write(architecture, config)
        return config

    def tensors(self, architecture: Architecture, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Tensors]:
        """Yield our tensors with theirs, in the order of the model.

        Args:
            architecture: the architecture.
            shapes: logical name -> whole shape of all our tensors.

        Raises:
            ConversionError: a tensor of ours has no place in this class.
        """
        inside = {row.ours: row for row in self.in_layer}
        outside = {row.ours: row for row in self.outside}
        for name, shape in shapes.items():
            module, _, kind = name.rpartition(".")
            prefix, index, part = _parts(module)
            row = (inside if index is not None else outside).get(part)
            if row is None:
                raise ConversionError(f"{self.class_name} has no place for {name}")
            prefix = "" if index is None else self.layer.format(index)
            parts = row.form.to_theirs(torch.empty(shape, device="meta"), architecture)
            theirs = {
                f"{prefix}{each}.{kind}": tuple(part.shape)
                for each, part in zip(row.theirs, parts, strict=True)
            }
            yield Tensors(name, shape, theirs, row.form)

    def weight_outside(self, ours: str) -> str:
        """Return the name of theirs of a weight of ours that is in no layer."""
        (row,) = (row for row in self.outside if f"{row.ours}.weight" == ours)
        return f"{row.theirs[0]}.weight"

    def stored_name(self, name: str, there: Mapping[str, Any]) -> str | None:
        """Return the name under which a tensor is stored in files of any version; None if it is not there."""
        others = [one for pair in self.other_names.items() if name in pair for one in pair]
        return next(
            (each for each in (name, name.removeprefix(self.base_prefix), *others) if each in there), None
        )

    def usual_name(self, stored: str) -> str:
        """Return the name that today's version gives to a tensor in a file of any version."""
        name = self.other_names.get(stored, stored)
        outside = {f"{each}.weight" for row in self.outside for each in row.theirs}
        return name if name in outside or name.startswith(self.base_prefix) else self.base_prefix + name

    def is_ignored(self, name: str) -> bool:
        """Return whether a stored tensor is no weight."""
        return name.endswith(self.ignored) if self.ignored else False


def _parts(module: str) -> tuple[str, int | None, str]:
    """Return the index of the layer and the part of "layers.INDEX.PART"; None for other modules."""
    first, _, rest = module.partition(".")
    index, _, part = rest.partition(".")
    return (first, int(index), part) if first == _LAYER else ("", None, module)
