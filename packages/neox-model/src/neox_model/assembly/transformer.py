"""Build a transformer layer from configuration, and the parts that it shares with the rest of the model."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from neox_config import NeoXConfig, Resolved
from neox_config.derive.objective import sees_later_tokens
from neox_config.derive.pipeline import splits_backward
from neox_config.derive.recomputation import recomputes_gated_product
from neox_config.facts.activations import ACTIVATION_FACTS
from neox_config.facts.attention import ATTENTION_FACTS
from neox_config.facts.norms import NORM_FACTS
from neox_model.assembly.adapters import build_adapters
from neox_model.assembly.attention import build_attention
from neox_model.assembly.choices import pick
from neox_model.assembly.operators import Operators
from neox_model.assembly.token_dropping import layers_that_drop
from neox_model.errors import LayoutError
from neox_model.initialization import build_init_method
from neox_model.layers.activations import ACTIVATIONS, GATED_ACTIVATIONS
from neox_model.layers.attention import DocumentMasks
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
    "build_layer",
    "build_norm",
    "init_method",
    "output_init_method",
]

logger = logging.getLogger(__name__)

Factory = Callable[[], nn.Module]


def init_method(config: NeoXConfig) -> InitMethod:
    """Return the initialization of embeddings and of the input projections of layers."""
    return _init(config, config.model.init_method)


def output_init_method(config: NeoXConfig) -> InitMethod:
    """Return the initialization of the projections that write to the residual stream."""
    return _init(config, config.model.output_layer_init_method)


def _init(config: NeoXConfig, name: str) -> InitMethod:
    model = config.model
    return build_init_method(
        name, std=model.init_method_std, hidden_size=model.hidden_size, num_layers=model.num_layers
    )


def build_norm(
    config: NeoXConfig, operators: Operators, group: Group
) -> tuple[type[nn.Module], dict[str, Any]]:
    """Return the class of the norm and its keyword arguments."""
    model = config.model
    arguments: dict[str, Any] = {
        "width": model.hidden_size,
        "epsilon": getattr(model, NORM_FACTS[model.norm].epsilon),
        "group": group,
    }
    if NORM_FACTS[model.norm].has_bias:
        arguments["bias"] = model.use_bias_in_norms
    if operators.norm is not None:
        arguments["operator"] = operators.norm
    if operators.norm_of_sum is not None:
        arguments["of_sum"] = operators.norm_of_sum
    if operators.norm_with_input is not None:
        arguments["with_input"] = operators.norm_with_input
    return pick(NORMS, model.norm, "norm"), arguments


def build_layer(
    resolved: Resolved,
    layer_index: int,
    *,
    group: Group,
    operators: Operators,
    masks: DocumentMasks | None = None,
) -> tuple[type[nn.Module], dict[str, Any]]:
    """Return the class of one layer and its keyword arguments.

    Args:
        resolved: the configuration.
        layer_index: index of the layer, from 0.
        group: the tensor-parallel ranks.
        operators: the operators that the layer calls.
        masks: masks of documents that the layers share; None: the layer makes its own.

    Raises:
        LayoutError: sizes do not divide.
        ModelError: a configured value has no implementation.
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
        "return_hidden_only": layer_index == model.num_layers - 1,
    }
    kind = resolved.derived.attention_types[layer_index]
    if ATTENTION_FACTS[kind].is_gmlp:
        return GMLPLayer, {**shared, "mlp": _spatial_mlp(config, kind, inits, operators)}
    drops_tokens = layer_index in layers_that_drop(config)
    # The document ids of a layer that drops tokens are those of the tokens that it keeps.
    own_masks = None if drops_tokens else masks
    return TokenDroppingTransformerLayer if drops_tokens else TransformerLayer, {
        **shared,
        "attention": build_attention(resolved, layer_index, **inits, operators=operators, masks=own_masks),
        "mlp": _mlp(resolved, inits, operators),
        "parallel_residual": model.gpt_j_residual,
        "adds_in_norm": operators.norm_of_sum is not None,
        "group": group,
    }


def _mlp(resolved: Resolved, inits: dict[str, Any], operators: Operators) -> Factory:
    config, width = resolved.config, resolved.derived.mlp_width
    model = config.model
    group: Group = inits["group"]
    if width % group.size:
        raise LayoutError(
            f"the MLP width of {width:,} cannot be split over {group.size} tensor-parallel ranks; "
            f"set mlp-width to a multiple of {group.size}"
        )
    options = {
        **inits,
        "bias": model.use_bias_in_mlp,
        "skip_bias": operators.bias_dropout_add is not None,
        "activation": _activation(config),
        "adapters": build_adapters(config),
    }
    if ACTIVATION_FACTS[model.activation].is_gated:
        is_fused = operators.gated_activation is not None
        options["gated_activation"] = operators.gated_activation
        options["gated_again"] = operators.gated_again
        options["recomputes_product"] = recomputes_gated_product(config, is_fused=is_fused)
        options["adds_gradients"] = not splits_backward(config)
        return partial(GatedMLP, model.hidden_size, width, **options)
    options["bias_activation"] = operators.bias_gelu
    return partial(MLP, model.hidden_size, width, **options)


def _spatial_mlp(config: NeoXConfig, kind: str, inits: dict[str, Any], operators: Operators) -> Factory:
    """Return a factory of the MLP of a gmlp or amlp layer, whose inner parts process whole sequences."""
    model = config.model
    inner = replace(inits["group"], splits_sequence=False)
    norm_class, norm_kwargs = build_norm(config, operators, inner)
    del norm_kwargs["width"]
    attention, is_causal = None, not sees_later_tokens(config, kind)
    if ATTENTION_FACTS[kind].has_inner_attention and model.gmlp_attn_dim is not None:
        attention = partial(
            TinyAttention,
            4 * model.hidden_size,
            model.gmlp_attn_dim,
            **{**inits, "group": inner},
            bias=model.use_bias_in_attn_linear,
            is_causal=is_causal,
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
            is_causal=is_causal,
            group=inner,
        ),
        activation=_activation(config),
        **inits,
        bias=model.use_bias_in_mlp,
        skip_bias=operators.bias_dropout_add is not None,
    )


def _activation(config: NeoXConfig) -> Callable[[Tensor], Tensor]:
    """Return the elementwise function; for a gated activation, that of the gate."""
    model = config.model
    if ACTIVATION_FACTS[model.activation].is_gated:
        return pick(GATED_ACTIVATIONS, model.activation, "activation")
    # bias_gelu_fusion implies the tanh form, even if "auto" does not choose the fused operator.
    is_tanh = model.activation == "gelu" and (model.openai_gelu or bool(model.bias_gelu_fusion))
    return pick(ACTIVATIONS, "gelu_tanh" if is_tanh else model.activation, "activation")
