"""`attention_config` spelled out: one attention type per layer."""

from typing import Any

from neox_launcher.config.problems import did_you_mean
from neox_launcher.config.schema import NeoXConfig
from neox_launcher.config.sections.attention import ATTENTION_TYPES

__all__ = ["expand_attention", "types_in"]

_OF_OTHERS = {"flash": "write global: flash attention calculates it where it can"}
_PATTERN = 'write [[["global", "local"], 6]] for 12 layers, or the name of every layer'


def expand_attention(pattern: tuple[Any, ...] | None, num_layers: int) -> tuple[str, ...]:
    """One attention type per layer.

    Args:
        pattern: `((types, count), ...)`, a count of "all" filling the model; or one type per layer; None is
            global everywhere.
        num_layers: layers of the model.

    Raises:
        ValueError: with a sentence that says why the pattern does not fit.
    """
    if pattern is None:
        return ("global",) * num_layers
    types: list[str] = []
    if all(isinstance(item, str) for item in pattern):
        types = [str(item) for item in pattern]
    else:
        for item in pattern:
            types += _repeated(item, num_layers, is_alone=len(pattern) == 1)
    for name in types:
        if name not in ATTENTION_TYPES:
            hint = (
                _OF_OTHERS.get(name)
                or did_you_mean(name, ATTENTION_TYPES)
                or f"use {', '.join(ATTENTION_TYPES)}"
            )
            raise ValueError(f"{name!r} is no attention type; {hint}")
    if len(types) != num_layers:
        raise ValueError(f"describes {len(types)} layers, but num-layers is {num_layers}; {_remedy(pattern)}")
    return tuple(types)


def types_in(config: NeoXConfig) -> frozenset[str]:
    """The types that layers have; none where attention_config is wrong, which has a rule of its own."""
    try:
        return frozenset(expand_attention(config.attention.attention_config, config.model.num_layers))
    except ValueError:
        return frozenset()


def _remedy(pattern: tuple[Any, ...]) -> str:
    if not pattern:
        return _PATTERN
    if len(pattern) == 1 and isinstance(pattern[0], tuple):
        return 'write "all" as the count: the types are repeated until the layers are full'
    return "each count says how often all types beside it are repeated"


def _repeated(item: Any, num_layers: int, *, is_alone: bool) -> list[str]:
    if not isinstance(item, tuple) or len(item) != 2:
        raise ValueError(f"is not a list of [[types], count]; {_PATTERN}")
    names, count = item
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, tuple) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"is not a list of [[types], count]; {_PATTERN}")
    if isinstance(count, str) and count.lower() == "all":
        if not is_alone:
            raise ValueError('has other entries beside a count of "all", which fills the model')
        if num_layers % len(names):
            raise ValueError(f"repeats {len(names)} types, which do not fill num-layers: {num_layers} evenly")
        return list(names) * (num_layers // len(names))
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f'has a count that is no positive whole number or "all"; {_PATTERN}')
    if count * len(names) > max(num_layers, 1) * 1000:
        raise ValueError(f"describes {count * len(names):,} layers, but num-layers is {num_layers}")
    return list(names) * count
