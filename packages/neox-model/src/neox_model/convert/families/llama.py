"""Llama, and what differs from it in windows, biases and norms of queries and keys: Mistral, Qwen2, Qwen3."""

from collections.abc import Mapping
from typing import Any

from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_model.convert.families.family import EPSILON, RMSNORM, ROTARY, Entry, Family, HeadDim, Key, Row
from neox_model.convert.families.rotary import RotaryBase, RotaryScaling
from neox_model.convert.families.windows import FULL, SLIDING, ChosenWindows, OneWindow
from neox_model.convert.forms import SEPARATE_QKV

__all__ = [
    *("ATTENTION_BIAS", "GATED_MLP", "LLAMA", "MISTRAL", "MLP_BIAS", "NORMS_BEFORE", "QK_NORM", "QWEN2"),
    *("QWEN3", "SELF_ATTENTION", "WHOLE_HEADS", "entries", "like_llama"),
]

SELF_ATTENTION = (
    Row("attention.qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), SEPARATE_QKV),
    Row("attention.dense", ("self_attn.o_proj",)),
)
QK_NORM = (
    Row("attention.qk_norm.query", ("self_attn.q_norm",)),
    Row("attention.qk_norm.key", ("self_attn.k_norm",)),
)
GATED_MLP = (
    Row("mlp.gate", ("mlp.gate_proj",)),
    Row("mlp.up", ("mlp.up_proj",)),
    Row("mlp.down", ("mlp.down_proj",)),
)
NORMS_BEFORE = (Row("norm1", ("input_layernorm",)), Row("norm2", ("post_attention_layernorm",)))
_IN_LAYER = (*SELF_ATTENTION, *NORMS_BEFORE, *GATED_MLP)
_OUTSIDE = (
    Row(TOKEN_EMBEDDING.removesuffix(".weight"), ("model.embed_tokens",)),
    Row("final_norm", ("model.norm",)),
    Row("lm_head", ("lm_head",)),
)
_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
_BLOCKS = ("rope_scaling.", "rope_parameters.", *(f"rope_parameters.{each}." for each in (FULL, SLIDING)))
WHOLE_HEADS: Mapping[str, tuple[Any, ...]] = {
    f"{block}partial_rotary_factor": (1.0,) for block in ("", *_BLOCKS)
}


def _as_many(config: Mapping[str, Any]) -> Any:
    return config.get("num_attention_heads")


def entries(
    kv_heads: Any = _as_many,
    *,
    epsilon: float = 1e-6,
    rotary: tuple[Entry, ...] = (RotaryBase(), RotaryScaling()),
    tied: bool = False,
) -> tuple[Entry, ...]:
    """Return the entries that all have, given what the class uses if they are absent.

    Args:
        kv_heads: number of key and value heads, or a function of the configuration.
        epsilon: of norms.
        rotary: entries of rotary positions.
        tied: the head is tied.
    """
    return (
        Key("num_hidden_layers", "layers"),
        Key("hidden_size", "width"),
        Key("num_attention_heads", "layers.mixer.heads"),
        Key("num_key_value_heads", "layers.mixer.kv_heads", kv_heads),
        Key("intermediate_size", "layers.channel.width"),
        Key("max_position_embeddings", "max_positions"),
        Key("hidden_act", "layers.channel.activation", "silu", _ACTIVATIONS),
        Key("rms_norm_eps", EPSILON, epsilon),
        *rotary,
        Key("tie_word_embeddings", "head.tied", tied),
    )


def like_llama(
    name: str,
    entries: tuple[Entry, ...],
    *,
    in_layer: tuple[Row, ...] = _IN_LAYER,
    fixed: Mapping[str, Any] | None = None,
    required: Mapping[str, tuple[Any, ...]] = WHOLE_HEADS,
    **others: Any,
) -> Family:
    """Return a class whose modules have Llama's names.

    Args:
        name: its `model_type`.
        entries: of its configuration.
        in_layer: the modules of a layer.
        fixed: values of all its models, in addition to RMSNorm and rotary positions.
        required: as in Family.
        others: further arguments of Family.
    """
    return Family(
        name=name,
        layer="model.layers.{}.",
        in_layer=in_layer,
        outside=_OUTSIDE,
        entries=entries,
        fixed={**RMSNORM, **ROTARY, **(fixed or {})},
        required=required,
        base_prefix="model.",
        ignored=(".rotary_emb.inv_freq",),
        **{"dropouts": {"attention-dropout": "attention_dropout"}, **others},
    )


ATTENTION_BIAS = Key("attention_bias", ("layers.mixer.output_bias", "layers.mixer.qkv_bias"), False)
MLP_BIAS = Key("mlp_bias", "layers.channel.bias", False)
LLAMA = like_llama("llama", (*entries(), HeadDim(), ATTENTION_BIAS, MLP_BIAS))
MISTRAL = like_llama("mistral", (*entries(8), HeadDim(), OneWindow()))
_QKV_BIAS = {"layers.mixer.qkv_bias": True}
QWEN2 = like_llama("qwen2", (*entries(32), HeadDim(), ChosenWindows()), fixed=_QKV_BIAS)
QWEN3 = like_llama(
    "qwen3",
    (*entries(32), HeadDim(128), ATTENTION_BIAS, ChosenWindows()),
    in_layer=(*_IN_LAYER, *QK_NORM),
    fixed={"layers.mixer.qk_norm": "head"},
)
