"""GPT-NeoX."""

from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_model.convert.classes import CLASSES
from neox_model.convert.families.family import Family, Key, Row
from neox_model.convert.families.rotary import RotaryBase, RotaryFraction, RotaryScaling
from neox_model.convert.families.windows import NoWindows

__all__ = ["GPT_NEOX"]

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "mish": "mish",
}

GPT_NEOX = Family(
    name="gpt_neox",
    class_name=CLASSES["gpt_neox"],
    layer="gpt_neox.layers.{}.",
    in_layer=(
        Row("norm1", ("input_layernorm",)),
        Row("norm2", ("post_attention_layernorm",)),
        # The order of the rows is ours: query, key and value of each head.
        Row("attention.qkv", ("attention.query_key_value",)),
        Row("attention.dense", ("attention.dense",)),
        Row("mlp.up", ("mlp.dense_h_to_4h",)),
        Row("mlp.down", ("mlp.dense_4h_to_h",)),
    ),
    outside=(
        Row(TOKEN_EMBEDDING.removesuffix(".weight"), ("gpt_neox.embed_in",)),
        Row("final_norm", ("gpt_neox.final_layer_norm",)),
        Row("lm_head", ("embed_out",)),
    ),
    entries=(
        Key("num_hidden_layers", "num_layers"),
        Key("hidden_size", "hidden_size"),
        # One entry for both, written last as that of queries: the class has one key and one value per query.
        Key("num_attention_heads", "kv_heads"),
        Key("num_attention_heads", "heads"),
        Key("intermediate_size", "mlp_width"),
        Key("max_position_embeddings", "max_positions", 2048),
        Key("hidden_act", "activation", "gelu", _ACTIVATIONS),
        Key("layer_norm_eps", "norm_epsilon", 1e-5),
        RotaryBase("rotary_emb_base"),
        RotaryFraction("rotary_pct", 0.25),
        RotaryScaling(),
        NoWindows(),
        Key("use_parallel_residual", "parallel_residual", True),
        Key("attention_bias", "qkv_bias", True),
        Key("attention_bias", "output_bias", True),
        Key("tie_word_embeddings", "tied", False),
    ),
    fixed={"norm": "layernorm", "norm_bias": True, "positions": "rotary", "mlp_bias": True},
    required={"quantization_config": ()},
    dropouts={"hidden-dropout": "hidden_dropout", "attention-dropout": "attention_dropout"},
    other_names={"lm_head.weight": "embed_out.weight"},
    base_prefix="gpt_neox.",
    ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)
