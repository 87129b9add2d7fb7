"""The declaration of a family: one class of transformers, its tensors and its configuration.

One table serves both directions, so that they cannot disagree.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from neox_config.facts.hugging_face import CLASSES
from neox_config.spec.model import Attention, ModelSpec
from neox_config.spec.values import ABSENT, flat, type_of, unflat
from neox_model.convert.differences import attention_of, simplest
from neox_model.convert.errors import ConversionError
from neox_model.convert.families.values import CHECKS, first, layer_count, whole_number
from neox_model.convert.forms import SAME, Form

__all__ = [
    *("EPSILON", "LAYERNORM", "RMSNORM", "ROTARY", "UNGATED"),
    *("Entry", "Family", "HeadDim", "Key", "Row", "Tensors", "lookup", "part_of_layer"),
]

# A layer of ours is "layers.INDEX.PART".
_LAYER = "layers"
_HEADS, _HEAD_WIDTH = "layers.mixer.heads", "layers.mixer.head_width"
_COMMON: Mapping[str, Any] = {
    "objective": "causal",
    "embedding.multiple": 1,
    "embedding.scale": 1.0,
    "embedding.position": None,
    "layers.mixer": "Attention",
    "layers.mixer.kind": "global",
    "layers.mixer.pattern": None,
    "layers.mixer.both_ways": False,
    "layers.mixer.position": None,
    "layers.mixer.qk_norm": None,
    "layers.mixer.qkv_bias": False,
    "layers.mixer.output_bias": False,
    "layers.mixer.scale": None,
    "layers.mixer.softcap": None,
    "layers.mixer.sinks": False,
    "layers.mixer.gate": "none",
    "layers.channel": "MLP",
    "layers.channel.bias": False,
    "layers.norm.zero_centered": False,
    "layers.norm_placement": "before",
    "layers.channel.limit": None,
    "layers.channel.alpha": 1.0,
    "layers.channel.up_offset": 0.0,
    "layers.channel.scores": "softmax",
    "layers.channel.normalized": False,
    "layers.channel.has_bias": False,
    "layers.channel.shared_width": 0,
    "layers.channel.shared_gate": False,
    "layers.residual": "serial",
    "layers.residual_after_norm": False,
    "layers.shares_norm": False,
    "layers.owner": None,
    "norm.zero_centered": False,
    "head": "Vocabulary",
    "head.scale": 1.0,
    "head.softcap": None,
    "adapters": None,
}
"""What the models of all classes have, unless a table states something else, by path."""
_UNPACK = (
    'python -c "from transformers import AutoModelForCausalLM, Mxfp4Config; AutoModelForCausalLM.'
    "from_pretrained('FOLDER', dtype='bfloat16', quantization_config=Mxfp4Config(dequantize=True))"
    ".save_pretrained('OUTPUT', save_original_format=False)\"; cp FOLDER/*token* OUTPUT"
)
_REQUIRED: Mapping[str, tuple[Any, ...]] = {"quantization_config": (), "is_causal": (True,)}
"""Entries that no class may have otherwise, as in Family."""
_ABSENT: Mapping[str, Any] = {
    _HEADS: 1,
    _HEAD_WIDTH: 1,
    "layers.mixer.kv_heads": 1,
    "layers.mixer.position.fraction": 1.0,
    "layers.mixer.position.base": 10000.0,
    "layers.mixer.position.scaling": (),
    "layers.mixer.qkv_bias": False,
    "layers.mixer.output_bias": False,
    "layers.mixer.scale": None,
    "layers.mixer.softcap": None,
    "head.softcap": None,
    "layers.channel.width": 1,
    "layers.channel.activation": "",
    "layers.channel.bias": False,
    "layers.channel.number": 2,
    "layers.channel.chosen": 1,
    "layers.channel.normalized": False,
    "layers.channel.shared_width": 1,
    "layers.channel.limit": None,
    "layers.channel.alpha": 1.0,
    "head.tied": False,
}
"""What is written for a model without such a value, as one without an MLP, or experts."""
ROTARY: Mapping[str, Any] = {"layers.mixer.position": "Rotary", "layers.mixer.position.fraction": 1.0}
EPSILON = ("layers.norm.epsilon", "norm.epsilon")
UNGATED: Mapping[str, str] = {
    "gelu": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh"),
    "relu": "relu",
    "relu2": "squared_relu",
    **dict.fromkeys(("silu", "swish"), "silu"),
    "mish": "mish",
}
"""Their activations without a gate -> ours."""


def _norms(kind: str, *, bias: bool) -> Mapping[str, Any]:
    return {
        f"{norm}.{name}": value
        for norm in ("layers.norm", "norm")
        for name, value in (("kind", kind), ("bias", bias))
    }


LAYERNORM, RMSNORM = _norms("layernorm", bias=True), _norms("rmsnorm", bias=False)
"""Values of all norms of a model, apart from `EPSILON`."""


class Entry(Protocol):
    """One or several entries of their configuration that give values of the model."""

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return values of the model by path, as `flat` has them."""

    def write(self, model: Mapping[str, Any], config: dict[str, Any]) -> None:
        """Add the entries, given the values of the model by path."""


def lookup(config: Mapping[str, Any], name: str) -> Any:
    """Return the entry with a dotted name; None if it is absent."""
    found: Any = config
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


@dataclass(frozen=True, slots=True)
class Key:
    """An entry that is a value of the model itself, or its word for it.

    Args:
        theirs: name of the entry; a dot separates a name inside a block.
        ours: path of the value in `ModelSpec`, or several with the same value, of which the first is written.
        default: the value that transformers uses if the entry is absent or null; or a function of the
            configuration.
        words: their values -> ours; the first of several for one of ours is written.
    """

    theirs: str
    ours: str | tuple[str, ...]
    default: Callable[[Mapping[str, Any]], Any] | Any = None
    words: Mapping[Any, Any] | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the paths."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the value for each path."""
        value = lookup(config, self.theirs)
        if value is None:
            value = self.default(config) if callable(self.default) else self.default
        if value is None:
            raise ConversionError(f"config.json has no {self.theirs}; copy the folder again")
        kind = type(next(iter(self.words))) if self.words else type_of(ModelSpec, self.paths[0])
        if kind in _CHECKS:
            value = _CHECKS[kind](value, self.theirs)
        if self.words:
            if value not in tuple(self.words):  # A list is no key of a dict.
                raise ConversionError(
                    f"config.json has {self.theirs}: {value!r}, but only {', '.join(map(str, self.words))} "
                    "can be converted"
                )
            value = self.words[value]
        return dict.fromkeys(self.paths, value)

    def write(self, model: Mapping[str, Any], config: dict[str, Any]) -> None:
        """Add the entry, unless it has no word for our value."""
        value = first(model, self.paths[0])
        if self.words:
            value = next((theirs for theirs, ours in self.words.items() if ours == value), None)
        *blocks, name = self.theirs.split(".")
        for block in blocks:
            config = config.setdefault(block, {})
        if value is not None:
            config[name] = value


@dataclass(frozen=True, slots=True)
class HeadDim:
    """The width of a head, for classes in which it does not follow from others.

    Args:
        default: the width if there is none; None: it follows from others.
        always: write it always: transformers computes scaled frequencies from it.
    """

    default: int | None = None
    always: bool = False

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the width if it is given."""
        found = config.get("head_dim", self.default)
        return {} if found is None else {_HEAD_WIDTH: whole_number(found, "head_dim")}

    def write(self, model: Mapping[str, Any], config: dict[str, Any]) -> None:
        """Add the width if it does not follow from others."""
        width = first(model, _HEAD_WIDTH)
        if self.always or self.default is not None or width * first(model, _HEADS) != model["width"]:
            config["head_dim"] = width


_CHECKS: Mapping[Any, Callable[[Any, str], Any]] = {**CHECKS, type_of(ModelSpec, _LAYER): layer_count}


@dataclass(frozen=True, slots=True)
class Row:
    """One of our modules or tensors, and their modules with its values.

    Args:
        ours: name of the module or tensor, in a layer or in the model.
        theirs: names of modules; with a form by entry, "{}" stands for the number of the entry.
        form: how tensors become theirs.
        kind: name of the tensor in theirs, if `ours` is one.
    """

    ours: str
    theirs: tuple[str, ...]
    form: Form = SAME
    kind: str = "weight"


@dataclass(frozen=True, slots=True)
class Tensors:
    """One tensor of ours, and those of theirs that it becomes.

    Args:
        ours: logical name.
        shape: its whole shape.
        theirs: name -> shape.
        form: the transformation.
        attention: that of the tensor's layer, or of any if it is in none.
    """

    ours: str
    shape: tuple[int, ...]
    theirs: Mapping[str, tuple[int, ...]]
    form: Form
    attention: Attention

    def split(self, ours: Tensor) -> tuple[Tensor, ...]:
        """Return theirs, given ours."""
        return self.form.to_theirs(ours, self.attention)

    def joined(self, theirs: tuple[Tensor, ...]) -> Tensor:
        """Return ours, given theirs."""
        return self.form.to_ours(theirs, self.attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One class of transformers.

    Args:
        name: `model_type`.
        layer: prefix of a layer, with "{}" for its index.
        in_layer: the modules of a layer.
        outside: the other modules.
        entries: entries of the configuration, which give values of the model.
        fixed: values of the model by path that all models of the class have; what neither gives is as in all
            classes.
        required: entries that must be absent or have one of these values.
        dropouts: our parameter -> theirs, None if the class has none; they do not change logits.
        other_names: names in files of other versions -> names in `outside`.
        in_memory: tensor of theirs in a layer, as transformers has had it in memory since 5.0, and as some
            files have it -> the modules whose weights are its rows, one after another; those with "{}" once
            for each of its entries. The tables name these, and files have them.
        joined: module of theirs in a layer -> the modules whose outputs it has, one after another; the tables
            name these.
        in_turn: tensor of theirs in a layer -> the tensors whose columns it has in turn; the tables name
            these.
        packed: endings of tensors in files with quantized weights.
        base_prefix: prefix that files of the model without its head lack.
        ignored: endings of tensors in older files that are not weights.
    """

    name: str
    layer: str
    in_layer: tuple[Row, ...]
    outside: tuple[Row, ...]
    entries: tuple[Entry, ...]
    fixed: Mapping[str, Any]
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    dropouts: Mapping[str, str] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)
    in_memory: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    in_turn: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    packed: tuple[str, ...] = ()
    base_prefix: str = ""
    ignored: tuple[str, ...] = ()

    @property
    def class_name(self) -> str:
        """Return the name of the class."""
        return CLASSES[self.name]

    def read(self, config: Mapping[str, Any]) -> ModelSpec:
        """Return the model of a configuration of this class."""
        for name, allowed in {**_REQUIRED, **self.required}.items():
            value = lookup(config, name)
            if value is not None and self.packed and name == "quantization_config":
                raise self.refusal_of_packed("config.json")
            if value is not None and value not in allowed:
                usable = f"only {' or '.join(map(str, allowed))}" if allowed else "only a model without it"
                raise ConversionError(
                    f"config.json has {name}: {value!r}, which neox-model does not have; {usable} can be "
                    "converted"
                )
        values = {**_COMMON, **self.fixed}
        for entry in self.entries:
            values |= entry.read(config)
        if _HEAD_WIDTH not in values and values["width"] % values[_HEADS]:
            raise ConversionError(
                f"config.json has a hidden size of {values['width']}, which its {values[_HEADS]} attention "
                "heads do not divide; copy it again"
            )
        head_width = values.setdefault(_HEAD_WIDTH, values["width"] // values[_HEADS])
        if config.get("head_dim") not in (None, head_width):
            raise ConversionError(
                f"config.json has head_dim: {config['head_dim']}, but the heads of {self.class_name} have "
                f"hidden-size / num-attention-heads = {head_width} channels"
            )
        return simplest(unflat(ModelSpec, values))

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the entries that give a model, as far as this class has it."""
        config: dict[str, Any] = {"architectures": [self.class_name], "model_type": self.name}
        there = {path: value for path, value in flat(simplest(spec)).items() if value is not ABSENT}
        values = {**_ABSENT, **there}
        for entry in self.entries:
            entry.write(values, config)
        return config

    def tensors(self, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Tensors]:
        """Yield our tensors with theirs, in the order of the model.

        Args:
            spec: the model, all of whose layers have attention.
            shapes: logical name -> whole shape of all our tensors.
        """
        inside = {row.ours: row for row in self.in_layer}
        outside = {row.ours: row for row in self.outside}
        for name, shape in shapes.items():
            module, _, kind = name.rpartition(".")
            index, part = part_of_layer(module)
            rows = inside if index is not None else outside
            row = rows.get(f"{part}.{kind}")
            if row is not None:
                kind = row.kind
            elif (row := rows.get(part)) is None:
                raise ConversionError(f"{self.class_name} has no place for {name}")
            prefix = "" if index is None else self.layer.format(index)
            attention = attention_of(spec.layers[index or 0])
            parts = row.form.to_theirs(torch.empty(shape, device="meta"), attention)
            modules = row.theirs
            if row.form.by_entry:
                modules = tuple(each.format(entry) for entry in range(shape[0]) for each in modules)
            theirs = {
                f"{prefix}{each}.{kind}": tuple(part.shape) for each, part in zip(modules, parts, strict=True)
            }
            yield Tensors(name, shape, theirs, row.form, attention)

    def in_files(self, name: str, entries: int) -> list[str]:
        """Return the tensors, as the tables name them, whose rows a tensor in memory has.

        Args:
            name: its name.
            entries: the length of its first dimension.
        """
        for whole, modules in self.in_memory.items():
            if name.endswith(f".{whole}"):
                prefix = name.removesuffix(whole)
                names = (module.format(entry) for entry in range(entries) for module in modules)
                return [f"{prefix}{each}.weight" for each in dict.fromkeys(names)]
        return [name]

    def joined_parts(self, name: str) -> tuple[str, tuple[str, ...]]:
        """Return the tensor that is stored, and its parts by their names in the tables, given one of them."""
        for whole, parts in self.in_turn.items():
            for part in parts:
                if name.endswith(f".{part}"):
                    prefix = name.removesuffix(part)
                    return f"{prefix}{whole}", tuple(f"{prefix}{each}" for each in parts)
        module, _, kind = name.rpartition(".")
        for whole, parts in self.joined.items():
            for part in parts:
                if module.endswith(f".{part}"):
                    prefix = module.removesuffix(part)
                    return f"{prefix}{whole}.{kind}", tuple(f"{prefix}{each}.{kind}" for each in parts)
        return name, (name,)

    def has_columns_in_turn(self, whole: str) -> bool:
        """Return whether the parts of a tensor are its columns in turn, not its rows one after another."""
        return whole.endswith(tuple(f".{each}" for each in self.in_turn)) if self.in_turn else False

    def refusal_of_packed(self, where: str) -> ConversionError:
        """Return the error for quantized weights."""
        return ConversionError(
            f"{where} has weights in MXFP4, which cannot be trained; write them in bfloat16, copy the "
            f"tokenizer's files there, and convert that folder: {_UNPACK}"
        )

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


def part_of_layer(module: str) -> tuple[int | None, str]:
    """Return INDEX and PART of the module "layers.INDEX.PART"; None and the module itself of others."""
    first, _, rest = module.partition(".")
    index, _, part = rest.partition(".")
    return (int(index), part) if first == _LAYER else (None, module)
