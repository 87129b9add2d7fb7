"""Gemma 2 and 3 (text), with norms before and after attention and MLP whose weights are stored minus 1."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neox_model.convert.families.family import EPSILON, HeadDim, Key, Row
from neox_model.convert.families.llama import (
    ATTENTION_BIAS,
    GATED_MLP,
    QK_NORM,
    SELF_ATTENTION,
    WHOLE_HEADS,
    like_llama,
)
from neox_model.convert.families.rotary import RotaryBase, RotaryByType, RotaryScaling
from neox_model.convert.families.values import Optional, first, positive
from neox_model.convert.families.windows import RepeatedWindows

__all__ = ["GEMMA2", "GEMMA3"]

_SCALE = "layers.mixer.scale"


@dataclass(frozen=True, slots=True)
class _EmbeddingScale:
    """The class multiplies embeddings by the root of the width."""

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"embedding.scale": config["hidden_size"] ** 0.5}

    def write(self, model: Mapping[str, Any], config: dict[str, Any]) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _ScaleOfScores:
    """`query_pre_attn_scalar`; scores are divided by its root."""

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        scalar = positive(config.get("query_pre_attn_scalar", 256), "query_pre_attn_scalar")
        return {_SCALE: None if scalar == config.get("head_dim", 256) else scalar**-0.5}

    def write(self, model: Mapping[str, Any], config: dict[str, Any]) -> None:
        scale, width = first(model, _SCALE), first(model, "layers.mixer.head_width")
        config["query_pre_attn_scalar"] = width if scale is None else round(scale**-2)


_IN_LAYER = (
    Row("norm1", ("input_layernorm",)),
    *SELF_ATTENTION,
    Row("norm1_after", ("post_attention_layernorm",)),
    Row("norm2", ("pre_feedforward_layernorm",)),
    *GATED_MLP,
    Row("norm2_after", ("post_feedforward_layernorm",)),
)
_FIXED: Mapping[str, Any] = {
    "layers.norm_placement": "both",
    "layers.norm.zero_centered": True,
    "norm.zero_centered": True,
}
_ENTRIES = (
    Key("num_hidden_layers", "layers"),
    Key("hidden_size", "width"),
    Key("num_attention_heads", "layers.mixer.heads"),
    Key("num_key_value_heads", "layers.mixer.kv_heads", 4),
    HeadDim(256),
    Key("intermediate_size", "layers.channel.width"),
    Key(
        "hidden_activation",
        "layers.channel.activation",
        "gelu_pytorch_tanh",
        {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu", "silu": "swiglu"},
    ),
    Key("rms_norm_eps", EPSILON, 1e-6),
    Key("tie_word_embeddings", "head.tied", True),
    ATTENTION_BIAS,
    _EmbeddingScale(),
    _ScaleOfScores(),
)
_REQUIRED: Mapping[str, tuple[Any, ...]] = {
    **WHOLE_HEADS,
    "use_bidirectional_attention": (False,),
}
_PATTERN = RepeatedWindows(2), RepeatedWindows(("sliding_window_pattern", 6))
GEMMA2 = like_llama(
    "gemma2",
    (
        *_ENTRIES,
        Key("max_position_embeddings", "max_positions", 8192),
        RotaryBase(),
        RotaryScaling(),
        Optional("attn_logit_softcapping", "layers.mixer.softcap", 50.0),
        Optional("final_logit_softcapping", "head.softcap", 30.0),
        _PATTERN[0],
    ),
    in_layer=_IN_LAYER,
    fixed=_FIXED,
    required=_REQUIRED,
)
GEMMA3 = like_llama(
    "gemma3_text",
    (
        *_ENTRIES,
        Key("max_position_embeddings", "max_positions", 131072),
        RotaryByType(_PATTERN[1], 1000000.0, 10000.0, "rope_local_base_freq"),
        Optional("final_logit_softcapping", "head.softcap"),
        _PATTERN[1],
    ),
    in_layer=(*_IN_LAYER, *QK_NORM),
    fixed={**_FIXED, "layers.mixer.qk_norm": "head"},
    # The class has the entry, but does not use it.
    required={**_REQUIRED, "attn_logit_softcapping": ()},
)
