"""OPT, whose learned positions begin two rows after the first."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_model.convert.errors import ConversionError
from neox_model.convert.families.family import LAYERNORM, UNGATED, Family, Key, Row
from neox_model.convert.forms import SEPARATE_QKV

__all__ = ["OPT"]


@dataclass(frozen=True, slots=True)
class _OneWidth:
    """`word_embed_proj_dim`, the width of the embedding."""

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        width, found = config["hidden_size"], config.get("word_embed_proj_dim")
        if found not in (None, width):
            raise ConversionError(
                f"config.json has word_embed_proj_dim: {found!r}, but hidden_size: {width}; of the published "
                "models, only opt-350m has such an embedding; convert another one"
            )
        return {}

    def write(self, model: Mapping[str, Any], config: dict[str, Any]) -> None:
        config["word_embed_proj_dim"] = model["width"]


_BIASES = ("layers.mixer.qkv_bias", "layers.mixer.output_bias", "layers.channel.bias")
OPT = Family(
    name="opt",
    layer="model.decoder.layers.{}.",
    in_layer=(
        Row("norm1", ("self_attn_layer_norm",)),
        Row("attention.qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), SEPARATE_QKV),
        Row("attention.dense", ("self_attn.out_proj",)),
        Row("norm2", ("final_layer_norm",)),
        Row("mlp.up", ("fc1",)),
        Row("mlp.down", ("fc2",)),
    ),
    outside=(
        Row(TOKEN_EMBEDDING.removesuffix(".weight"), ("model.decoder.embed_tokens",)),
        Row("embedding.position_embeddings", ("model.decoder.embed_positions",)),
        Row("final_norm", ("model.decoder.final_layer_norm",)),
        Row("lm_head", ("lm_head",)),
    ),
    entries=(
        _OneWidth(),
        Key("do_layer_norm_before", "layers.norm_placement", True, {True: "before"}),
        Key("num_hidden_layers", "layers"),
        Key("hidden_size", "width"),
        # The class has one key and one value per query.
        Key("num_attention_heads", ("layers.mixer.heads", "layers.mixer.kv_heads")),
        Key("ffn_dim", "layers.channel.width", 3072),
        Key("max_position_embeddings", ("max_positions", "embedding.position.count"), 2048),
        Key("activation_function", "layers.channel.activation", "relu", UNGATED),
        Key("enable_bias", _BIASES, True),
        Key("tie_word_embeddings", "head.tied", True),
    ),
    fixed={
        **LAYERNORM,
        "layers.norm.epsilon": 1e-5,
        "norm.epsilon": 1e-5,
        "embedding.position": "Learned",
        "embedding.position.offset": 2,
    },
    required={
        "_remove_final_layer_norm": (False,),
        "layer_norm_elementwise_affine": (True,),
    },
    dropouts={"hidden-dropout": "dropout", "attention-dropout": "attention_dropout"},
    base_prefix="model.",
)
