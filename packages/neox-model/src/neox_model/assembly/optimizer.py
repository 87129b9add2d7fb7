"""Build the optimizer."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from neox_config.errors import ConfigError
from neox_config.facts.optimizers import OPTIMIZER_FACTS
from neox_config.schema.sections.optimizer import Optimizer as Chosen
from neox_config.spec.run import RunSpec
from neox_model.assembly.choices import DTYPES
from neox_model.optim import OPTIMIZERS
from neox_model.optim.adagrad import Adagrad
from neox_model.optim.param_groups import split_by_kind, split_by_weight_decay
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["build_optimizer"]

_TORCH_CLASSES = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
} | {"adagrad": Adagrad}


def build_optimizer(
    optimizer: Chosen, run: RunSpec, model: nn.Module, *, model_group: Group, data_group: Group
) -> Optimizer:
    """Build the configured optimizer over a model's parameters: one of `OPTIMIZERS` or of torch.optim.

    Args:
        optimizer: the optimizer and its arguments.
        run: how the model runs.
        model: the model, or this stage's part.
        model_group: the ranks that share each layer's matrices.
        data_group: the data-parallel ranks.

    Raises:
        ConfigError: there is no such optimizer, or it does not accept the given arguments.
    """
    groups = split_by_weight_decay(model.parameters(), optimizer.params.weight_decay)
    own = OPTIMIZERS.get(optimizer.kind)
    if own is not None:
        _check_device(optimizer, groups, is_offloaded=run.layout.offloads_optimizer)
        values, facts = optimizer.params.model_dump(), OPTIMIZER_FACTS[optimizer.kind]
        arguments = facts.arguments_in_effect(optimizer.params.given())
        if facts.joins_split_weights:
            arguments["model_group"] = model_group
        if facts.replica_states:
            arguments["data_group"] = data_group
        if facts.joins_rows is not None:
            arguments["row_group"] = data_group if run.partitions_rows else SINGLE_RANK
        if facts.matrix_states:
            groups = split_by_kind(groups, _matrices_of_layers(model))
            is_wide = run.precision.weights in ("fp32", "fp64")
            arguments["iteration_dtype"] = DTYPES[run.precision.weights] if is_wide else torch.bfloat16
        return own(groups, **{name: values[name] for name in facts.declared}, **arguments)
    if optimizer.kind not in _TORCH_CLASSES:
        known = ", ".join(sorted({*OPTIMIZERS, *_TORCH_CLASSES}))
        raise ConfigError(f"optimizer.type: unknown optimizer {optimizer.type!r}; set one of {known}")
    arguments = {name: value for name, value in optimizer.params.given().items() if name != "weight_decay"}
    return _build_torch_class(_TORCH_CLASSES[optimizer.kind], groups, arguments)


def _check_device(section: Chosen, groups: list[dict[str, Any]], *, is_offloaded: bool) -> None:
    """Raise an error if a CPU optimizer has parameters that are neither on the CPU nor offloaded."""
    device = groups[0]["params"][0].device
    if section.kind.startswith("cpu_") and device.type != "cpu" and not is_offloaded:
        raise ConfigError(
            f"optimizer.type: {section.type} requires CPU-resident or offloaded parameters, but the weights "
            f"are on {device}; add zero_optimization: {{stage: 1, offload_optimizer: {{device: cpu}}}}"
        )


def _matrices_of_layers(model: nn.Module) -> set[int]:
    """Return the ids of the weights of linear layers, without the head, which is not one of these."""
    linear = (ColumnParallelLinear, RowParallelLinear)
    return {id(module.weight) for module in model.modules() if isinstance(module, linear)}


def _build_torch_class(
    kind: type[Optimizer], groups: list[dict[str, Any]], arguments: dict[str, Any]
) -> Optimizer:
    try:
        return kind(groups, **arguments)
    # torch's constructors raise any of the three for invalid arguments.
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"optimizer.params: torch.optim.{kind.__name__} rejects these arguments: {error}; "
            "see its documentation for the valid ones"
        ) from error
