"""gpt-oss, all of whose layers have experts; up and gate of these are the columns of one tensor in turn."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neox_model.convert.families.family import HeadDim, Key, Row
from neox_model.convert.families.llama import (
    ATTENTION_BIAS,
    NORMS_BEFORE,
    SELF_ATTENTION,
    WHOLE_HEADS,
    entries,
    like_llama,
)
from neox_model.convert.families.rotary import RotaryBase, RotaryScaling
from neox_model.convert.families.values import Optional
from neox_model.convert.families.windows import RepeatedWindows

__all__ = ["GPT_OSS"]

_CHANNEL, _MATRICES = "layers.channel", "mlp.experts"


@dataclass(frozen=True, slots=True)
class _Yarn(RotaryScaling):
    """Without an entry, the class scales."""

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        yarn = {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }
        has_entry = config.get("rope_scaling") or config.get("rope_parameters")
        return RotaryScaling.read(self, config if has_entry else {**config, "rope_parameters": yarn})


def _of_experts(ours: str, theirs: str) -> Row:
    return Row(f"{_MATRICES}.{ours}", (_MATRICES,), kind=theirs)


_LIKE_LLAMA: tuple[Any, ...] = entries(8, epsilon=1e-5, rotary=(RotaryBase(default=150000.0), _Yarn()))
GPT_OSS = like_llama(
    "gpt_oss",
    (
        *(each for each in _LIKE_LLAMA if getattr(each, "theirs", "") != "hidden_act"),
        HeadDim(64),
        Key(ATTENTION_BIAS.theirs, ATTENTION_BIAS.ours, True),
        RepeatedWindows(2, tokens=128),
        Key("num_local_experts", f"{_CHANNEL}.number", 128),
        Key("num_experts_per_tok", f"{_CHANNEL}.chosen", 4),
        Optional("swiglu_limit", f"{_CHANNEL}.limit", 7.0),
        Key("swiglu_alpha", f"{_CHANNEL}.alpha", 1.702),
        # The class computes swiglu whatever it is.
        Key("hidden_act", f"{_CHANNEL}.activation", "silu", {"silu": "swiglu", "swish": "swiglu"}),
    ),
    in_layer=(
        *NORMS_BEFORE,
        *SELF_ATTENTION,
        Row("attention.core", ("self_attn",)),
        Row("mlp.router", ("mlp.router",)),
        Row("mlp.router.logits_bias", ("mlp.router",), kind="bias"),
        *(
            _of_experts(f"{ours}{kind}", f"{ours}_proj{kind}")
            for ours in ("gate", "up", "down")
            for kind in ("", "_bias")
        ),
    ),
    fixed={
        "layers.mixer.sinks": True,
        _CHANNEL: "Experts",
        # The softmax of the largest logits is that of all, divided by its sum over the largest.
        f"{_CHANNEL}.normalized": True,
        f"{_CHANNEL}.logits_bias": True,
        f"{_CHANNEL}.biases": True,
        f"{_CHANNEL}.up_offset": 1.0,
    },
    required=WHOLE_HEADS,
    in_turn={
        f"{_MATRICES}.gate_up_proj{kind}": (f"{_MATRICES}.gate_proj{kind}", f"{_MATRICES}.up_proj{kind}")
        for kind in ("", "_bias")
    },
    packed=("_blocks", "_scales"),
)
