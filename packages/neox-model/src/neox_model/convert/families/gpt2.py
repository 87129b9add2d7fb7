"""GPT-2, whose matrices are stored as input by output."""

from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_model.convert.families.family import EPSILON, LAYERNORM, UNGATED, Family, Key, Row
from neox_model.convert.forms import FUSED_QKV_TRANSPOSED, TRANSPOSED

__all__ = ["GPT2"]


GPT2 = Family(
    name="gpt2",
    layer="transformer.h.{}.",
    in_layer=(
        Row("norm1", ("ln_1",)),
        Row("attention.qkv", ("attn.c_attn",), FUSED_QKV_TRANSPOSED),
        Row("attention.dense", ("attn.c_proj",), TRANSPOSED),
        Row("norm2", ("ln_2",)),
        Row("mlp.up", ("mlp.c_fc",), TRANSPOSED),
        Row("mlp.down", ("mlp.c_proj",), TRANSPOSED),
    ),
    outside=(
        Row(TOKEN_EMBEDDING.removesuffix(".weight"), ("transformer.wte",)),
        Row("embedding.position_embeddings", ("transformer.wpe",)),
        Row("final_norm", ("transformer.ln_f",)),
        Row("lm_head", ("lm_head",)),
    ),
    entries=(
        Key("n_layer", "layers"),
        Key("n_embd", "width"),
        # The class has one key and one value per query.
        Key("n_head", ("layers.mixer.heads", "layers.mixer.kv_heads")),
        Key("n_inner", "layers.channel.width", lambda config: 4 * (config.get("n_embd") or 0) or None),
        Key("n_positions", ("max_positions", "embedding.position.count"), 1024),
        Key("activation_function", "layers.channel.activation", "gelu_new", UNGATED),
        Key("layer_norm_epsilon", EPSILON, 1e-5),
        Key("tie_word_embeddings", "head.tied", True),
    ),
    fixed={
        **LAYERNORM,
        "embedding.position": "Learned",
        "layers.mixer.qkv_bias": True,
        "layers.mixer.output_bias": True,
        "layers.channel.bias": True,
    },
    required={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    dropouts={"hidden-dropout": "resid_pdrop", "attention-dropout": "attn_pdrop"},
    base_prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
)
