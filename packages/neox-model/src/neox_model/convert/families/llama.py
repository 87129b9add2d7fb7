"""Llama, and Mistral and Qwen2, which differ from it in windows and biases."""

from collections.abc import Mapping
from typing import Any

from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_model.convert.classes import CLASSES
from neox_model.convert.families.family import EPSILON, RMSNORM, ROTARY, Entry, Family, HeadDim, Key, Row
from neox_model.convert.families.rotary import RotaryBase, RotaryScaling
from neox_model.convert.families.windows import ChosenWindows, OneWindow
from neox_model.convert.forms import SEPARATE_QKV

__all__ = ["LLAMA", "MISTRAL", "QWEN2"]

_IN_LAYER = (
    Row("norm1", ("input_layernorm",)),
    Row("attention.qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), SEPARATE_QKV),
    Row("attention.dense", ("self_attn.o_proj",)),
    Row("norm2", ("post_attention_layernorm",)),
    Row("mlp.gate", ("mlp.gate_proj",)),
    Row("mlp.up", ("mlp.up_proj",)),
    Row("mlp.down", ("mlp.down_proj",)),
)
_OUTSIDE = (
    Row(TOKEN_EMBEDDING.removesuffix(".weight"), ("model.embed_tokens",)),
    Row("final_norm", ("model.norm",)),
    Row("lm_head", ("lm_head",)),
)
_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}
_REQUIRED: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "partial_rotary_factor": (1.0,),
    "rope_parameters.partial_rotary_factor": (1.0,),
}


def _entries(kv_heads: Any) -> tuple[Entry, ...]:
    """Return the entries that all three have.

    Args:
        kv_heads: number of key and value heads if the entry is absent; a function of the configuration.
    """
    return (
        Key("num_hidden_layers", "layers"),
        Key("hidden_size", "width"),
        Key("num_attention_heads", "layers.mixer.heads"),
        Key("num_key_value_heads", "layers.mixer.kv_heads", kv_heads),
        HeadDim(),
        Key("intermediate_size", "layers.channel.width"),
        Key("max_position_embeddings", "max_positions"),
        Key("hidden_act", "layers.channel.activation", "silu", _ACTIVATIONS),
        Key("rms_norm_eps", EPSILON, 1e-6),
        RotaryBase(),
        RotaryScaling(),
        Key("tie_word_embeddings", "head.tied", False),
    )


def _like_llama(name: str, entries: tuple[Entry, ...], *, qkv_bias: bool = False) -> Family:
    return Family(
        name=name,
        class_name=CLASSES[name],
        layer="model.layers.{}.",
        in_layer=_IN_LAYER,
        outside=_OUTSIDE,
        entries=entries,
        fixed={**RMSNORM, **ROTARY, "layers.mixer.qkv_bias": qkv_bias},
        required=_REQUIRED,
        dropouts={"attention-dropout": "attention_dropout"},
        base_prefix="model.",
        ignored=(".rotary_emb.inv_freq",),
    )


LLAMA = _like_llama(
    "llama",
    (
        *_entries(lambda config: config.get("num_attention_heads")),
        Key("attention_bias", ("layers.mixer.output_bias", "layers.mixer.qkv_bias"), False),
        Key("mlp_bias", "layers.channel.bias", False),
    ),
)
MISTRAL = _like_llama("mistral", (*_entries(8), OneWindow()))
QWEN2 = _like_llama("qwen2", (*_entries(32), ChosenWindows()), qkv_bias=True)
