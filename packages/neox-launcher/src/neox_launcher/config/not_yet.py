"""Documented values whose part is not built: what waits, and what is refused; both may only shrink.

`neox-config check` tells of those that wait in a note; `neox-launch` refuses them before a worker starts,
so that nothing which was asked for is silently left out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from neox_launcher.config.problems import Problem, in_words, place_of
from neox_launcher.config.schema import NeoXConfig

__all__ = ["NOT_YET", "REFUSED", "NotYet", "not_built_yet"]

_WAIT = "is not built yet"


@dataclass(frozen=True, slots=True)
class NotYet:
    """Values of one parameter that nothing carries out yet.

    Args:
        is_asked_for: whether a value needs the missing part.
        instead: what works today.
    """

    is_asked_for: Callable[[Any], bool]
    instead: str


def _on(instead: str = "leave it out") -> NotYet:
    """A switch that must stay off, or a setting that must stay empty."""
    return NotYet(lambda value: value not in (None, False, "none"), instead)


def _choices(*names: str, instead: str) -> NotYet:
    return NotYet(lambda value: isinstance(value, str) and value.lower() in names, instead)


def _other_than(value: Any, instead: str) -> NotYet:
    return NotYet(lambda given: given != value, instead)


NOT_YET: Mapping[str, NotYet] = {
    "amp.enabled": _on("use fp16 or bf16"),
    "optimizer.type": _choices(
        "lamb",
        "onebitadam",
        "onebitlamb",
        "zerooneadam",
        "sm3",
        instead="use Adam, or a class of torch.optim",
    ),
    "scheduler.type": _on("use lr-decay-style"),
    "zero_optimization.grad_hooks": _other_than(True, "leave it out"),
    "zero_optimization.offload_optimizer.ratio": _other_than(1.0, "leave it out: all states move"),
    "zero_optimization.zero_quantized_weights": _on("leave it out: DeepSpeed's quantizer is for CUDA alone"),
    "zero_optimization.zero_quantized_gradients": _on(
        "leave it out: DeepSpeed's quantizer is for CUDA alone"
    ),
    "adlr_autoresume": _on(),
    "checkpoint_validation_with_forward_pass": _on(),
    "log_grad_norm": _on(),
    "log_gradient_noise_scale": _on(),
    "eval_tasks": _on(),
    "char_level_ppl": _on(),
    "comms_logger.enabled": _on(),
    "eigenvalue.enabled": _on(),
    "checkpoint.use_node_local_storage": _on("save to a folder that all hosts share"),
    "compression_training.layer_reduction.enabled": _on(),
    "compression_training.weight_quantization.shared_parameters.enabled": _on(),
    "compression_training.activation_quantization.shared_parameters.enabled": _on(),
    "compression_training.sparse_pruning.shared_parameters.enabled": _on(),
    "compression_training.row_pruning.shared_parameters.enabled": _on(),
    "compression_training.head_pruning.shared_parameters.enabled": _on(),
}


# Switches that nothing will carry out, and why: refused whenever a configuration is read.
REFUSED: Mapping[str, str] = {
    "sparse_gradients": "is gone from DeepSpeed, and gradients of embeddings are dense here",
    "compression_training.channel_pruning.shared_parameters.enabled": "prunes convolutions; there are none",
}


def not_built_yet(config: NeoXConfig) -> list[Problem]:
    """What this configuration asks for that nothing carries out yet."""
    found = []
    for name, row in NOT_YET.items():
        value = config.value_of(name)
        if row.is_asked_for(value):
            place = place_of(config.sources, name)
            found.append(Problem(name, _WAIT, row.instead, value=in_words(value), place=place))
    return found
