"""Documented values that are not implemented yet, or never will be; both tables may only shrink.

`neox-config check` prints a note for values that are not implemented yet; `neox-launch` refuses them before a
worker starts, so that no setting is silently ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from neox_config.problems import Problem, in_words, place_of
from neox_config.schema.config import NeoXConfig

__all__ = ["NOT_YET", "REFUSED", "NotYet", "not_built_yet"]

_WAIT = "is not implemented yet"


@dataclass(frozen=True, slots=True)
class NotYet:
    """Values of one parameter that are not implemented yet.

    Args:
        is_asked_for: function that returns True for such a value.
        instead: what to do instead.
    """

    is_asked_for: Callable[[Any], bool]
    instead: str


def _on(instead: str = "remove it") -> NotYet:
    """Describe a switch that must be off, or a setting that must be empty."""
    return NotYet(lambda value: value not in (None, False, "none", ()), instead)


NOT_YET: Mapping[str, NotYet] = {
    "compression_training.layer_reduction.enabled": _on(),
}


# Switches that will not be implemented, and why; refused whenever a configuration is loaded.
REFUSED: Mapping[str, str] = {
    "zero_optimization.zero_quantized_gradients": (
        "gives wrong gradients: DeepSpeed 0.19.8 reads bfloat16 and float32 as float16, and averages over "
        "all ranks instead of the data-parallel ones"
    ),
    "sparse_gradients": "is no longer supported by DeepSpeed; embedding gradients are dense",
    "compression_training.channel_pruning.shared_parameters.enabled": (
        "prunes convolutions, and the model has none"
    ),
    "compression_training.weight_quantization.shared_parameters.quantizer_kernel": (
        "is a CUDA kernel that DeepSpeed removed with its compression; PyTorch quantizes the weights"
    ),
}


def not_built_yet(config: NeoXConfig) -> list[Problem]:
    """Return a problem for each setting of the configuration that is not implemented yet."""
    found = []
    for name, row in NOT_YET.items():
        value = config.value_of(name)
        if row.is_asked_for(value):
            place = place_of(config.sources, name)
            found.append(Problem(name, _WAIT, row.instead, value=in_words(value), place=place))
    return found
