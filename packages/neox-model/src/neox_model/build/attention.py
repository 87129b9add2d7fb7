"""Attention and positions from configuration.

Every softmax here is float32 inside, so what `attention_softmax_in_fp32` asks for holds always.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from neox_launcher.config import NeoXConfig, Resolved
from neox_model.build.choices import pick
from neox_model.build.operators import Operators
from neox_model.layers.attention import CORES, ParallelAttention, SoftmaxCore
from neox_model.layers.positions import INPUT_POSITIONS, QUERY_KEY_POSITIONS
from neox_model.parallel.groups import Group
from neox_model.parallel.logical import InitMethod

__all__ = ["build_attention", "build_input_position"]

Factory = Callable[[], nn.Module]

_POSITIONS: dict[str, type[nn.Module] | None] = {**INPUT_POSITIONS, **QUERY_KEY_POSITIONS, "none": None}


def build_input_position(config: NeoXConfig, init: InitMethod) -> Factory | None:
    """Makes what is added to the embeddings; None where nothing is.

    Raises:
        ModelError: `pos_emb` has no implementation.
    """
    model = config.model
    arguments: dict[str, dict[str, Any]] = {
        "learned": {
            "num_positions": model.max_position_embeddings,
            "hidden_size": model.hidden_size,
            "init": init,
        },
        "sinusoidal": {"hidden_size": model.hidden_size},
    }
    return _position(config, INPUT_POSITIONS, arguments)


def _query_key_position(config: NeoXConfig, operators: Operators) -> Factory | None:
    rotary = {
        "head_width": _head_width(config),
        "fraction": config.attention.rotary_pct,
        "base": config.attention.rotary_emb_base,
        "operator": operators.rotary,
    }
    return _position(config, QUERY_KEY_POSITIONS, {"rotary": rotary})


def _position(
    config: NeoXConfig, kind: Mapping[str, type[nn.Module]], arguments: Mapping[str, Mapping[str, Any]]
) -> Factory | None:
    """Makes the configured position if it is of this kind."""
    name = config.attention.pos_emb
    cls = pick(_POSITIONS, name, "pos-emb")
    return partial(cls, **arguments[name]) if cls is not None and name in kind else None


def build_attention(
    resolved: Resolved,
    layer_index: int,
    *,
    init: InitMethod,
    output_init: InitMethod,
    group: Group,
    operators: Operators,
) -> Factory:
    """Makes the attention of one layer.

    Args:
        resolved: the configuration.
        layer_index: the layer's place, from 0.
        init: for the query-key-value projection.
        output_init: for the output projection.
        group: the ranks the heads are split over.
        operators: what the layer calls.

    Raises:
        ModelError: the layer's attention type or `pos_emb` has no implementation.
    """
    config = resolved.config
    return partial(
        ParallelAttention,
        config.model.hidden_size,
        config.model.num_attention_heads,
        core=_core(resolved, layer_index, group, operators),
        init=init,
        output_init=output_init,
        position=_query_key_position(config, operators),
        skip_bias=operators.bias_dropout_add is not None,
        group=group,
    )


def _core(resolved: Resolved, layer_index: int, group: Group, operators: Operators) -> Factory:
    attention = resolved.config.attention
    shared: dict[str, Any] = {"dropout": resolved.config.model.attention_dropout, "group": group}
    core = pick(CORES, resolved.derived.attention_types[layer_index], "attention-config")
    if operators.softmax is None:
        return partial(core, **shared)
    return partial(
        SoftmaxCore,
        softmax=operators.softmax,
        head_width=_head_width(resolved.config),
        coefficient=max(1, layer_index) if attention.apply_query_key_layer_scaling else 1,
        **shared,
    )


def _head_width(config: NeoXConfig) -> int:
    return config.model.hidden_size // config.model.num_attention_heads
