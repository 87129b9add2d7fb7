"""Build attention and position embeddings from configuration.

Every softmax computes in float32, so `attention_softmax_in_fp32` always holds.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from neox_config import NeoXConfig, Resolved
from neox_config.derive.attention_layers import has_qkv_bias, sliding_window
from neox_config.derive.objective import has_padding, is_encoder, sees_later_tokens
from neox_config.derive.recomputation import recomputes_attention
from neox_model.assembly.adapters import build_adapters
from neox_model.assembly.choices import pick
from neox_model.assembly.operators import Operators
from neox_model.assembly.patterns import PATTERNS
from neox_model.initialization import build_init_method
from neox_model.layers.attention import (
    DenseCore,
    DocumentMasks,
    FlexCore,
    ParallelAttention,
    SoftmaxCore,
)
from neox_model.layers.positions import INPUT_POSITIONS, QUERY_KEY_POSITIONS, RELATIVE_POSITIONS
from neox_model.parallel.groups import Group
from neox_model.parallel.logical import InitMethod

__all__ = ["build_attention", "build_input_position", "log_attention_paths"]

logger = logging.getLogger(__name__)

Factory = Callable[[], nn.Module]

_POSITIONS: dict[str, type[nn.Module] | None] = {
    **INPUT_POSITIONS,
    **QUERY_KEY_POSITIONS,
    **RELATIVE_POSITIONS,
    "none": None,
}


def build_input_position(config: NeoXConfig, init: InitMethod, group: Group) -> Factory | None:
    """Return a factory of the position embedding added to the input; None if there is none.

    Raises:
        ModelError: `pos_emb` has no implementation.
    """
    model = config.model
    arguments: dict[str, dict[str, Any]] = {
        "learned": {
            "num_positions": model.max_position_embeddings,
            "hidden_size": model.hidden_size,
            "init": init,
            "group": group,
        },
        "sinusoidal": {"hidden_size": model.hidden_size},
    }
    return _position(config, INPUT_POSITIONS, arguments)


def _query_key_position(config: NeoXConfig, operators: Operators) -> Factory | None:
    rotary = {
        "head_width": _head_width(config),
        "fraction": config.attention.rotary_pct,
        "base": config.attention.rotary_emb_base,
        "scaling": config.attention.rotary_scaling.in_use(config.model.max_position_embeddings),
        "operator": operators.rotary,
        "splitting": operators.split_rotary,
    }
    return _position(config, QUERY_KEY_POSITIONS, {"rotary": rotary})


def _relative_position(config: NeoXConfig, group: Group) -> Factory | None:
    model, attention = config.model, config.attention
    alibi = {"heads": model.num_attention_heads, "group": group}
    rpe = {
        **alibi,
        "num_buckets": attention.rpe_num_buckets,
        "max_distance": attention.rpe_max_distance,
        "head_width": _head_width(config),
        "both_ways": is_encoder(config) and not attention.rpe_causal,
        "init": build_init_method(
            "xavier_normal",
            std=model.init_method_std,
            hidden_size=model.hidden_size,
            num_layers=model.num_layers,
        ),
    }
    return _position(config, RELATIVE_POSITIONS, {"rpe": rpe, "alibi": alibi})


def _position(
    config: NeoXConfig, kind: Mapping[str, type[nn.Module]], arguments: Mapping[str, Mapping[str, Any]]
) -> Factory | None:
    """Return a factory of the configured position embedding if it is of this kind, else None."""
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
    masks: DocumentMasks | None = None,
) -> Factory:
    """Return a factory of the attention of one layer.

    Args:
        resolved: the configuration.
        layer_index: index of the layer, from 0.
        init: initialization of the query-key-value projection.
        output_init: initialization of the output projection.
        group: the ranks over which the heads are split.
        operators: the operators that the layer calls.
        masks: masks of documents that the layers share; None: the layer makes its own.

    Raises:
        ModelError: the layer's attention type or `pos_emb` has no implementation.
    """
    model = resolved.config.model
    return partial(
        ParallelAttention,
        model.hidden_size,
        model.num_attention_heads,
        key_value_heads=model.num_kv_heads,
        core=_core(resolved, layer_index, group, operators, masks),
        recomputes_core=recomputes_attention(resolved.config),
        init=init,
        output_init=output_init,
        position=_query_key_position(resolved.config, operators),
        qkv_bias=has_qkv_bias(resolved.config),
        output_bias=model.use_bias_in_attn_linear,
        # A norm that adds the output to the residual does not add its bias.
        skip_bias=operators.bias_dropout_add is not None and operators.norm_of_sum is None,
        group=group,
        adapters=build_adapters(resolved.config),
    )


def _core(
    resolved: Resolved, layer_index: int, group: Group, operators: Operators, masks: DocumentMasks | None
) -> Factory:
    config, kind = resolved.config, resolved.derived.attention_types[layer_index]
    core, _ = _path(config, kind, operators)
    options: dict[str, Any] = {
        "pattern": pick(PATTERNS, kind, "attention-config")(resolved, layer_index, group),
        "position": _relative_position(config, group),
        "is_causal": not sees_later_tokens(config, kind),
        "dropout": config.model.attention_dropout,
        "group": group,
    }
    if core is FlexCore:
        options["masks"] = masks
    if core is SoftmaxCore:
        scales = config.attention.apply_query_key_layer_scaling
        options["softmax"] = operators.softmax
        options["head_width"] = _head_width(config)
        options["coefficient"] = max(1, layer_index) if scales else 1
    return partial(core, **options)


def _path(config: NeoXConfig, kind: str, operators: Operators) -> tuple[type[nn.Module], str]:
    """Return the attention core for a kind of attention, and the reason for the log."""
    attention = config.attention
    if operators.softmax is not None:
        return SoftmaxCore, _why_scores_are_made(config)
    needs = {
        f"{kind} attention": kind != "global",
        "sliding-window-width": kind == "global" and sliding_window(config) is not None,
        f"pos-emb: {attention.pos_emb}": attention.pos_emb in RELATIVE_POSITIONS,
        "reset-attention-mask": config.data.reset_attention_mask,
        "padding": has_padding(config),
    }
    asked = " and ".join(name for name, is_needed in needs.items() if is_needed)
    if not asked:
        direction = "to all tokens" if is_encoder(config) else "with is_causal"
        return DenseCore, f"PyTorch's scaled_dot_product_attention {direction}"
    if operators.flex_unusable is None:
        return FlexCore, f"FlexAttention with compiled block masks, for {asked}"
    return DenseCore, (
        f"PyTorch's scaled_dot_product_attention with a mask of queries by keys, for {asked}; not "
        f"FlexAttention, because {operators.flex_unusable}"
    )


def _why_scores_are_made(config: NeoXConfig) -> str:
    asked = {
        "onnx-safe": config.model.onnx_safe,
        "apply-query-key-layer-scaling": config.attention.apply_query_key_layer_scaling,
        "scaled-upper-triang-masked-softmax-fusion": (
            config.attention.scaled_upper_triang_masked_softmax_fusion is True
        ),
        "scaled-masked-softmax-fusion": config.attention.scaled_masked_softmax_fusion is True,
    }
    names = " and ".join(name for name, is_asked in asked.items() if is_asked)
    return f"softmax of stored scores, for {names}; without it PyTorch's attention is used, which is faster"


def log_attention_paths(resolved: Resolved, operators: Operators) -> None:
    """Log once how each kind of attention in the model is computed, and why."""
    for kind, count in Counter(resolved.derived.attention_types).items():
        if kind in PATTERNS:
            _, reason = _path(resolved.config, kind, operators)
            logger.info("attention of %d %s layer%s: %s", count, kind, "s" if count > 1 else "", reason)


def _head_width(config: NeoXConfig) -> int:
    return config.model.hidden_size // config.model.num_attention_heads
