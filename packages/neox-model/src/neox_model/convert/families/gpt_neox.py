"""GPT-NeoX."""

from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_model.convert.families.family import EPSILON, LAYERNORM, ROTARY, UNGATED, Family, Key, Row
from neox_model.convert.families.rotary import RotaryBase, RotaryFraction, RotaryScaling

__all__ = ["GPT_NEOX"]


GPT_NEOX = Family(
    name="gpt_neox",
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
        Key("num_hidden_layers", "layers"),
        Key("hidden_size", "width"),
        # The class has one key and one value per query.
        Key("num_attention_heads", ("layers.mixer.heads", "layers.mixer.kv_heads")),
        Key("intermediate_size", "layers.channel.width"),
        Key("max_position_embeddings", "max_positions", 2048),
        Key("hidden_act", "layers.channel.activation", "gelu", UNGATED),
        Key("layer_norm_eps", EPSILON, 1e-5),
        RotaryBase("rotary_emb_base"),
        RotaryFraction("rotary_pct", 0.25),
        RotaryScaling(),
        Key("use_parallel_residual", "layers.residual", True, {True: "parallel", False: "serial"}),
        Key("attention_bias", ("layers.mixer.output_bias", "layers.mixer.qkv_bias"), True),
        Key("tie_word_embeddings", "head.tied", False),
    ),
    fixed={**LAYERNORM, **ROTARY, "layers.channel.bias": True},
    dropouts={"hidden-dropout": "hidden_dropout", "attention-dropout": "attention_dropout"},
    other_names={"lm_head.weight": "embed_out.weight"},
    base_prefix="gpt_neox.",
    ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)
