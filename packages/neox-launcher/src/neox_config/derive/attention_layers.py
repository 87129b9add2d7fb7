"""Expansion of `attention_config` to one attention type per layer."""

from collections.abc import Iterable
from typing import Any

from neox_config.facts.attention import ATTENTION_FACTS, attention_type
from neox_config.pluralize import pluralize
from neox_config.problems import did_you_mean
from neox_config.schema.config import NeoXConfig

__all__ = ["attention_names", "expand_attention", "has_qkv_bias", "of_kind", "sliding_window", "types_in"]

# Types of successive layers, and how often they are repeated.
_Run = tuple[tuple[str, ...], int]

_PATTERN = 'write [[["global", "local"], 6]] for 12 layers, or list the type of every layer'


def expand_attention(
    pattern: tuple[Any, ...] | None, num_layers: int, kinds: Iterable[str] = ()
) -> tuple[str, ...]:
    """Return the attention type of each layer, or its kind.

    Args:
        pattern: `((types, count), ...)`, where a count of "all" repeats the types up to the last layer; or
            one type per layer. None means global attention in every layer.
        num_layers: number of layers of the model.
        kinds: names in attention_kinds.

    Raises:
        ValueError: The pattern is not valid for this number of layers; the message is followed by "; " and a
            remedy.
    """
    if pattern is None:
        return ("global",) * num_layers
    if all(isinstance(item, str) for item in pattern):
        runs: list[_Run] = [(pattern, 1)]
    else:
        runs = [_repeated(item, num_layers, is_alone=len(pattern) == 1) for item in pattern]
    known = (*ATTENTION_FACTS, *kinds)
    for name in (name for names, _ in runs for name in names):
        if name not in known:
            hint = did_you_mean(name, known) or f"use {', '.join(known)}"
            raise ValueError(f"{name!r} is not an attention type; {hint}")
    described = sum(len(names) * count for names, count in runs)
    if described != num_layers:
        raise ValueError(
            f"describes {pluralize(described, 'layer')}, but num-layers is {num_layers}; change the counts, "
            'or write "all" as the count to repeat the types up to the last layer'
        )
    return tuple(name for names, count in runs for name in names * count)


def types_in(config: NeoXConfig) -> frozenset[str]:
    """Return the attention types of the layers; empty if attention_config is invalid (see its rule)."""
    try:
        return frozenset(map(attention_type, attention_names(config)))
    except ValueError:
        return frozenset()


def attention_names(config: NeoXConfig) -> tuple[str, ...]:
    """Return the attention type of each layer, or its kind.

    Raises:
        ValueError: as `expand_attention`.
    """
    attention = config.attention
    return expand_attention(attention.attention_config, config.model.num_layers, attention.attention_kinds)


def of_kind(config: NeoXConfig, name: str) -> NeoXConfig:
    """Return the configuration for layers of this name in attention_config: with what its kind overrides."""
    kind = config.attention.attention_kinds.get(name)
    if kind is None:
        return config
    return config.model_copy(update={"attention": config.attention.replaced(**kind.overrides())})


def sliding_window(config: NeoXConfig) -> int | None:
    """Return the number of earlier tokens that a token of a global layer sees; None if it sees all."""
    width = config.attention.sliding_window_width
    return None if width is None or width >= config.model.seq_length - 1 else width


def has_qkv_bias(config: NeoXConfig) -> bool:
    """Return whether the query-key-value projection has a bias."""
    model = config.model
    return model.use_bias_in_attn_linear if model.use_bias_in_qkv is None else model.use_bias_in_qkv


def _repeated(item: Any, num_layers: int, *, is_alone: bool) -> _Run:
    if not isinstance(item, tuple) or len(item) != 2:
        raise ValueError(f"is not a list of [[types], count]; {_PATTERN}")
    names, count = item
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, tuple) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"is not a list of [[types], count]; {_PATTERN}")
    if isinstance(count, str) and count.lower() == "all":
        if not is_alone:
            raise ValueError('has other entries next to a count of "all"; remove them, or give numbers')
        if num_layers % len(names):
            raise ValueError(
                f"repeats {len(names)} types, which does not divide num-layers: {num_layers}; "
                "use a number of types that does"
            )
        return names, num_layers // len(names)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f'has a count that is not a positive whole number or "all"; {_PATTERN}')
    return names, count
