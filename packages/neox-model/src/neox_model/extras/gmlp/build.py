"""Build a gMLP layer."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from neox_config.spec.model import Layer
from neox_config.spec.model import SpatialMLP as Mixer
from neox_config.spec.run import RunSpec
from neox_model.assembly.norms import build_norm
from neox_model.assembly.operators import Operators
from neox_model.assembly.transformer import build_activation
from neox_model.extras.gmlp.layer import GMLPLayer, SpatialGate, SpatialMLP, TinyAttention

__all__ = ["build_gmlp_layer"]

Options = dict[str, Any]


def build_gmlp_layer(
    layer: Layer, width: int, run: RunSpec, shared: Options, *, inits: Options, operators: Operators
) -> tuple[type[nn.Module], Options]:
    """Return the class of a gmlp or amlp layer, which processes whole sequences, and its keyword arguments.

    Args:
        layer: its specification.
        width: channels between layers.
        run: how the model runs.
        shared: arguments that all layers have.
        inits: arguments that all matrices have.
        operators: the operators that the layer calls.
    """
    mixer = layer.mixer
    assert isinstance(mixer, Mixer)
    inner, attention = replace(inits["group"], splits_sequence=False), None
    if mixer.attention_width is not None:
        attention = partial(
            TinyAttention,
            mixer.width,
            mixer.attention_width,
            **{**inits, "group": inner},
            bias=mixer.attention_bias,
            is_causal=not mixer.both_ways,
            dropout=run.dropout.attention,
        )
    norm_class, norm_kwargs = build_norm(layer.norm, mixer.width, operators, inner)
    del norm_kwargs["width"]
    gate = partial(
        SpatialGate,
        mixer.width,
        mixer.length,
        norm=partial(norm_class, **norm_kwargs),
        attention=attention,
        is_causal=not mixer.both_ways,
        group=inner,
    )
    mlp = partial(
        SpatialMLP,
        width,
        gate=gate,
        activation=build_activation(mixer.activation),
        **inits,
        bias=mixer.bias,
        skip_bias=operators.bias_dropout_add is not None,
    )
    return GMLPLayer, shared | {"mlp": mlp}
