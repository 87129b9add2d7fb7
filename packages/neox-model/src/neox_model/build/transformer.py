"""One transformer layer from configuration, and the parts it shares with the rest of the model."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from neox_launcher.config import NeoXConfig, Resolved
from neox_model.build.attention import build_attention
from neox_model.build.choices import pick
from neox_model.build.operators import Operators
from neox_model.build.token_dropping import layers_that_drop
from neox_model.errors import LayoutError
from neox_model.initialization import build_init_method
from neox_model.layers.activations import ACTIVATIONS, GATED_ACTIVATIONS, is_gated
from neox_model.layers.gmlp_layer import GMLPLayer, SpatialGate, SpatialMLP, TinyAttention
from neox_model.layers.mlp import MLP, GatedMLP
from neox_model.layers.norms import NORMS
from neox_model.layers.residual_layer import add_dropped
from neox_model.layers.token_dropping import TokenDroppingTransformerLayer
from neox_model.layers.transformer_layer import TransformerLayer
from neox_model.parallel.groups import Group
from neox_model.parallel.logical import InitMethod
from neox_model.parallel.sequence import with_own_dropout

__all__ = [
    "GMLP_TYPES",
    "build_layer",
    "build_norm",
    "init_method",
    "output_init_method",
]

logger = logging.getLogger(__name__)

# Names in attention_config of layers that mix positions without attention over heads.
GMLP_TYPES = ("gmlp", "amlp")

Factory = Callable[[], nn.Module]


def init_method(config: NeoXConfig) -> InitMethod:
    """How embeddings and the projections into a layer start."""
    return _init(config, config.model.init_method)


def output_init_method(config: NeoXConfig) -> InitMethod:
    """How the projections that write into the residual stream start."""
    return _init(config, config.model.output_layer_init_method)


def _init(config: NeoXConfig, name: str) -> InitMethod:
    model = config.model
    return build_init_method(
        name, std=model.init_method_std, hidden_size=model.hidden_size, num_layers=model.num_layers
    )


def build_norm(
    config: NeoXConfig, operators: Operators, group: Group
) -> tuple[type[nn.Module], dict[str, Any]]:
    """The norm's class and its keyword arguments."""
    model = config.model
    epsilon = {
        "layernorm": model.layernorm_epsilon,
        "apexlayernorm": model.layernorm_epsilon,
        "rmsnorm": model.rms_norm_epsilon,
        "scalenorm": model.scalenorm_epsilon,
    }
    arguments: dict[str, Any] = {"width": model.hidden_size, "epsilon": epsilon[model.norm], "group": group}
    if operators.layer_norm is not None:
        arguments["operator"] = operators.layer_norm
    return pick(NORMS, model.norm, "norm"), arguments


def build_layer(
    resolved: Resolved, layer_index: int, *, group: Group, operators: Operators
) -> tuple[type[nn.Module], dict[str, Any]]:
    """The class of one layer and its keyword arguments.

    Args:
        resolved: the configuration.
        layer_index: the layer's place, from 0.
        group: the tensor-parallel ranks.
        operators: what the layer calls.

    Raises:
        LayoutError: sizes that do not divide.
        ModelError: something configured has no implementation.
    """
    config = resolved.config
    model = config.model
    inits: dict[str, Any] = {
        "init": init_method(config),
        "output_init": output_init_method(config),
        "group": group,
    }
    norm_class, norm_kwargs = build_norm(config, operators, group)
    shared = {
        "norm": partial(norm_class, **norm_kwargs),
        "dropout": model.hidden_dropout,
        "residual_after_norm": model.apply_residual_connection_post_layernorm,
        "bias_dropout_add": with_own_dropout(operators.bias_dropout_add or add_dropped, group),
        "ends_documents": layer_index == model.num_layers - 1,
    }
    kind = resolved.derived.attention_types[layer_index]
    if kind in GMLP_TYPES:
        return GMLPLayer, {**shared, "mlp": _spatial_mlp(config, kind, inits, operators)}
    cls = TokenDroppingTransformerLayer if layer_index in layers_that_drop(config) else TransformerLayer
    return cls, {
        **shared,
        "attention": build_attention(resolved, layer_index, **inits, operators=operators),
        "mlp": _mlp(resolved, inits, operators),
        "parallel_residual": model.gpt_j_residual,
    }


def _mlp(resolved: Resolved, inits: dict[str, Any], operators: Operators) -> Factory:
    config, width = resolved.config, resolved.derived.intermediate_size
    model = config.model
    group: Group = inits["group"]
    if width % group.size:
        raise LayoutError(
            f"the MLP's width of {width:,} cannot be split over {group.size} tensor-parallel ranks; "
            f"set intermediate-size to a multiple of {group.size}"
        )
    options = {
        **inits,
        "bias": model.use_bias_in_mlp,
        "skip_bias": operators.bias_dropout_add is not None,
        "activation": _activation(config),
    }
    if is_gated(model.activation):
        return partial(GatedMLP, model.hidden_size, width, **options)
    options["bias_activation"] = operators.bias_gelu
    return partial(MLP, model.hidden_size, width, **options)


def _spatial_mlp(config: NeoXConfig, kind: str, inits: dict[str, Any], operators: Operators) -> Factory:
    """What a gmlp or amlp layer has: the parts inside its split matrices see whole sequences."""
    model = config.model
    inner = replace(inits["group"], splits_sequence=False)
    norm_class, norm_kwargs = build_norm(config, operators, inner)
    del norm_kwargs["width"]
    attention = None
    if kind == "amlp" and model.gmlp_attn_dim is not None:
        attention = partial(
            TinyAttention,
            4 * model.hidden_size,
            model.gmlp_attn_dim,
            **{**inits, "group": inner},
            bias=model.use_bias_in_attn_linear,
            dropout=model.attention_dropout,
        )
    return partial(
        SpatialMLP,
        model.hidden_size,
        gate=partial(
            SpatialGate,
            4 * model.hidden_size,
            model.seq_length,
            norm=partial(norm_class, **norm_kwargs),
            attention=attention,
            group=inner,
        ),
        activation=_activation(config),
        **inits,
        bias=model.use_bias_in_mlp,
        skip_bias=operators.bias_dropout_add is not None,
    )


def _activation(config: NeoXConfig) -> Callable[[Tensor], Tensor]:
    """The elementwise function; of a gated activation that of the gate."""
    model = config.model
    if is_gated(model.activation):
        return GATED_ACTIVATIONS[model.activation]
    # bias_gelu_fusion means the tanh form, whether or not "auto" finds the fused operator faster.
    is_tanh = model.activation == "gelu" and (model.openai_gelu or bool(model.bias_gelu_fusion))
    return pick(ACTIVATIONS, "gelu_tanh" if is_tanh else model.activation, "activation")
