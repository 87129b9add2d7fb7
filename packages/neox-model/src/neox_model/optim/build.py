"""From configuration to the optimizer and its learning-rate schedule."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from neox_launcher.config import NeoXConfig
from neox_launcher.errors import ConfigError
from neox_model.optim import ARGUMENTS, OPTIMIZERS
from neox_model.optim.adagrad import Adagrad
from neox_model.optim.lr_schedule import LearningRateSchedule, WarmupThenDecay
from neox_model.optim.param_groups import split_by_weight_decay

__all__ = ["build_optimizer", "build_schedule"]

_TORCH_CLASSES = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
} | {"adagrad": Adagrad}


def build_optimizer(config: NeoXConfig, model: nn.Module) -> Optimizer:
    """The configured optimizer over a model's parameters: one of `OPTIMIZERS`, else a class of torch.optim.

    Raises:
        ConfigError: there is no such optimizer, or it does not take the given arguments.
    """
    section = config.optimizer.optimizer
    groups = split_by_weight_decay(model.parameters(), section.params.weight_decay)
    own = OPTIMIZERS.get(section.kind)
    if own is not None:
        _check_device(config, groups)
        values = section.params.model_dump()
        return own(groups, **{name: values[name] for name in ARGUMENTS[section.kind] if name in values})
    if section.kind not in _TORCH_CLASSES:
        known = ", ".join(sorted({*OPTIMIZERS, *_TORCH_CLASSES}))
        raise ConfigError(f"optimizer.type: {section.type!r} is no optimizer here; use one of {known}")
    arguments = {name: value for name, value in section.params.given().items() if name != "weight_decay"}
    return _build_torch_class(_TORCH_CLASSES[section.kind], groups, arguments)


def _check_device(config: NeoXConfig, groups: list[dict[str, Any]]) -> None:
    """What is named for the CPU updates there: where the weights are, or where ZeRO moves them."""
    section = config.optimizer.optimizer
    is_offloaded = config.zero.zero_optimization.offload_optimizer.device != "none"
    device = groups[0]["params"][0].device
    if section.kind.startswith("cpu_") and device.type != "cpu" and not is_offloaded:
        raise ConfigError(
            f"optimizer.type: {section.type} keeps its states in host memory, and the weights are on "
            f"{device}; add zero_optimization: {{stage: 1, offload_optimizer: {{device: cpu}}}}"
        )


def build_schedule(
    config: NeoXConfig, optimizer: Optimizer, *, decay_iterations: int
) -> LearningRateSchedule:
    """The configured schedule, at its first update."""
    section = config.lr_schedule
    curve = WarmupThenDecay(
        style=section.lr_decay_style,
        peak=config.optimizer.optimizer.params.lr,
        floor=section.min_lr,
        warmup=section.warmup,
        decay_iterations=decay_iterations,
    )
    return LearningRateSchedule(optimizer, curve)


def _build_torch_class(
    kind: type[Optimizer], groups: list[dict[str, Any]], arguments: dict[str, Any]
) -> Optimizer:
    try:
        return kind(groups, **arguments)
    # torch's constructors raise all three for arguments that do not fit.
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"optimizer.params: torch.optim.{kind.__name__} does not take them: {error}; "
            "its documentation lists what it takes"
        ) from error
