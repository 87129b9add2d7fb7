"""Classes with experts: Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE.

Their auxiliary loss (`router_aux_loss_coef`) does not change logits, is off unless a run asks for it
(`output_router_logits`), and is over the tokens of a batch and of all layers together. No value of
moe-balance-loss, which is of one layer, is the same, so it is not converted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neox_config.spec.values import Each
from neox_model.convert.errors import ConversionError
from neox_model.convert.families.family import HeadDim, Key, Row
from neox_model.convert.families.llama import (
    ATTENTION_BIAS,
    GATED_MLP,
    NORMS_BEFORE,
    QK_NORM,
    SELF_ATTENTION,
    WHOLE_HEADS,
    entries,
    like_llama,
)
from neox_model.convert.families.rotary import RotaryBase, RotaryScaling
from neox_model.convert.families.values import first, in_layers, whole_number
from neox_model.convert.families.windows import ChosenWindows, OneWindow
from neox_model.convert.forms import ONE_PER_EXPERT

__all__ = ["MIXTRAL", "OLMOE", "QWEN2_MOE", "QWEN3_MOE"]

_CHANNEL = "layers.channel"
_WIDTH = f"{_CHANNEL}.width"
_OF_KIND = {"Experts": "moe_intermediate_size", "MLP": "intermediate_size"}


@dataclass(frozen=True, slots=True)
class _Number:
    """A number with a least one that neox-model has.

    Args:
        theirs: names of the entry, of which the first is written.
        default: the number if there is none.
        ours: path of the value in `ModelSpec`.
        least: the least one; a smaller one of ours, which is none of theirs, is not written.
    """

    theirs: tuple[str, ...]
    default: int
    ours: str = f"{_CHANNEL}.number"
    least: int = 2

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        name = self.theirs[0]
        found = next((config[each] for each in self.theirs if config.get(each) is not None), self.default)
        if whole_number(found, name) < self.least:
            raise ConversionError(
                f"config.json has {name}: {found}, but neox-model has at least {self.least} of them where "
                "there are some; convert another model"
            )
        return {self.ours: found}

    def write(self, model: Mapping[str, Any], config: dict[str, Any]) -> None:
        value = first(model, self.ours)
        if value >= self.least:
            config[self.theirs[0]] = value


@dataclass(frozen=True, slots=True)
class _SomeLayers:
    """The layers with experts, and the widths of experts and of the blocks of the other layers.

    Args:
        width: that of an expert if there is no entry.
    """

    width: int

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        step = whole_number(step, "decoder_sparse_step")
        if not isinstance(dense, list) or not all(type(each) is int for each in dense):
            raise ConversionError(
                f"config.json has mlp_only_layers: {dense!r}, which is not a list of numbers of layers; "
                "correct it, or copy the folder again"
            )
        given = {"moe_intermediate_size": self.width, **config}
        widths = {kind: whole_number(given.get(name), name) for kind, name in _OF_KIND.items()}
        layers = range(config["num_hidden_layers"])
        kinds = ["MLP" if (index + 1) % step or index in dense else "Experts" for index in layers]
        return {_CHANNEL: Each(tuple(kinds)), _WIDTH: Each(tuple(widths[kind] for kind in kinds))}

    def write(self, model: Mapping[str, Any], config: dict[str, Any]) -> None:
        kinds, widths = in_layers(model, _CHANNEL), in_layers(model, _WIDTH)
        named = dict(zip(kinds, widths, strict=True))
        config |= {name: named.get(kind, first(model, _WIDTH)) for kind, name in _OF_KIND.items()}
        config["decoder_sparse_step"] = 1
        config["mlp_only_layers"] = [index for index, kind in enumerate(kinds) if kind != "Experts"]


def _in_layer(block: str = "mlp", names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")) -> Any:
    """Return the modules of a layer with experts, and their tensors in memory.

    Args:
        block: name of the router and the experts in files.
        names: those of an expert's gate, up and down there.
    """
    router = f"{block}.gate"
    gate, up, down = (f"{block}.experts.{{}}.{name}" for name in names)
    rows = (
        *SELF_ATTENTION,
        *NORMS_BEFORE,
        Row("mlp.router", (router,)),
        Row("mlp.experts.gate", (gate,), ONE_PER_EXPERT),
        Row("mlp.experts.up", (up,), ONE_PER_EXPERT),
        Row("mlp.experts.down", (down,), ONE_PER_EXPERT),
    )
    fused = {"mlp.experts.gate_up_proj": (gate, up), "mlp.experts.down_proj": (down,)}
    return rows, fused if block == "mlp" else {"mlp.gate.weight": (router,), **fused}


_SHARED = (
    Row("mlp.shared.gate", ("mlp.shared_expert.gate_proj",)),
    Row("mlp.shared.up", ("mlp.shared_expert.up_proj",)),
    Row("mlp.shared.down", ("mlp.shared_expert.down_proj",)),
    Row("mlp.shared_gate", ("mlp.shared_expert_gate",)),
)
_EXPERTS: Mapping[str, Any] = {_CHANNEL: "Experts"}
_NORMALIZED = Key("norm_topk_prob", f"{_CHANNEL}.normalized", False)
_ROWS, _IN_MEMORY = _in_layer()
_ROWS_OF_MIXTRAL, _IN_MEMORY_OF_MIXTRAL = _in_layer("block_sparse_moe", ("w1", "w3", "w2"))


def _chosen(default: int) -> Key:
    return Key("num_experts_per_tok", f"{_CHANNEL}.chosen", default)


def _every_second(config: Mapping[str, Any]) -> list[bool]:
    """Return the layers with a window, as transformers chooses them: every second of the first ones."""
    most = whole_number(config.get("max_window_layers", 28), "max_window_layers")
    return [index % 2 == 0 and index < most for index in range(config["num_hidden_layers"])]


MIXTRAL = like_llama(
    "mixtral",
    (
        *entries(8, epsilon=1e-5, rotary=(RotaryBase(default=1e6), RotaryScaling())),
        HeadDim(always=True),
        OneWindow(default=None),
        _Number(("num_local_experts", "num_experts"), 8),
        _chosen(2),
    ),
    in_layer=_ROWS_OF_MIXTRAL,
    fixed={**_EXPERTS, f"{_CHANNEL}.normalized": True},
    # Theirs changes what experts read, too.
    required={**WHOLE_HEADS, "router_jitter_noise": (0.0,)},
    in_memory=_IN_MEMORY_OF_MIXTRAL,
)
QWEN2_MOE = like_llama(
    "qwen2_moe",
    (
        *entries(16),
        HeadDim(),
        Key("qkv_bias", "layers.mixer.qkv_bias", True),
        ChosenWindows(slides=_every_second),
        _Number(("num_experts",), 60),
        _chosen(4),
        _NORMALIZED,
        _SomeLayers(1408),
        _Number(("shared_expert_intermediate_size",), 5632, f"{_CHANNEL}.shared_width", 1),
    ),
    in_layer=(*_ROWS, *GATED_MLP, *_SHARED),
    fixed={f"{_CHANNEL}.shared_gate": True},
    in_memory=_IN_MEMORY,
)
QWEN3_MOE = like_llama(
    "qwen3_moe",
    (
        *entries(4),
        HeadDim(),
        ATTENTION_BIAS,
        OneWindow(switch="use_sliding_window"),
        _Number(("num_experts", "num_local_experts"), 128),
        _chosen(8),
        _NORMALIZED,
        _SomeLayers(768),
    ),
    in_layer=(*_ROWS, *GATED_MLP, *QK_NORM),
    fixed={"layers.mixer.qk_norm": "head"},
    in_memory=_IN_MEMORY,
)
OLMOE = like_llama(
    "olmoe",
    (
        *entries(epsilon=1e-5),
        ATTENTION_BIAS,
        _Number(("num_experts", "num_local_experts"), 64),
        _chosen(8),
        _NORMALIZED,
    ),
    in_layer=(*_ROWS, *QK_NORM),
    fixed={**_EXPERTS, "layers.mixer.qk_norm": "width"},
    required={**WHOLE_HEADS, "clip_qkv": ()},
    in_memory=_IN_MEMORY,
)
