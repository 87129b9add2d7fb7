"""Build the optimizer."""

import logging
from collections.abc import Callable, Iterator, Mapping
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from neox_config.errors import ConfigError
from neox_config.facts.optimizers import OPTIMIZER_FACTS
from neox_config.schema.sections.optimizer import Optimizer as Chosen
from neox_config.spec.run import Multipliers, RunSpec
from neox_model.assembly.choices import DTYPES
from neox_model.layers.experts import Experts
from neox_model.optim import OPTIMIZERS
from neox_model.optim.adagrad import Adagrad
from neox_model.optim.param_groups import split_by_kind, split_by_multipliers, split_by_weight_decay
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.linear import ColumnParallelLinear, RowParallelLinear
from neox_model.parallel.logical import named_logical_parameters, whole_shape_of

__all__ = ["build_optimizer"]

logger = logging.getLogger(__name__)

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
    if run.multipliers:
        has_eps = "eps" in OPTIMIZER_FACTS[optimizer.kind].declared
        eps = optimizer.params.eps if has_eps else None
        groups = _with_multipliers(groups, run.multipliers, model, eps=eps)
    if optimizer.kind in OPTIMIZERS:
        device = groups[0]["params"][0].device
        if optimizer.kind.startswith("cpu_") and device.type != "cpu" and not run.layout.offloads_optimizer:
            raise ConfigError(
                f"optimizer.type: {optimizer.type} requires CPU-resident or offloaded parameters, but the "
                f"weights are on {device}; add zero_optimization: {{stage: 1, offload_optimizer: "
                "{device: cpu}}"
            )
        values, facts = optimizer.params.model_dump(), OPTIMIZER_FACTS[optimizer.kind]
        arguments = facts.arguments_in_effect(optimizer.params.given())
        if facts.joins_split_weights:
            arguments["model_group"] = model_group
        if facts.replica_states:
            arguments["data_group"] = data_group
        if facts.gathers_rows is not None:
            arguments["row_group"] = data_group if run.partitions_rows else SINGLE_RANK
        if facts.matrix_states:
            groups = split_by_kind(groups, {id(weight) for weight in _matrices(model)})
            is_wide = run.precision.weights in ("fp32", "fp64")
            arguments["iteration_dtype"] = DTYPES[run.precision.weights] if is_wide else torch.bfloat16
        own: Callable[..., Optimizer] = resolve_name(OPTIMIZERS[optimizer.kind])
        return own(groups, **{name: values[name] for name in facts.declared}, **arguments)
    if optimizer.kind not in _TORCH_CLASSES:
        known = ", ".join(sorted({*OPTIMIZERS, *_TORCH_CLASSES}))
        raise ConfigError(f"optimizer.type: unknown optimizer {optimizer.type!r}; set one of {known}")
    arguments = {name: value for name, value in optimizer.params.given().items() if name != "weight_decay"}
    kind = _TORCH_CLASSES[optimizer.kind]
    try:
        return kind(groups, **arguments)
    # torch's constructors raise any of the three for invalid arguments.
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"optimizer.params: torch.optim.{kind.__name__} rejects these arguments: {error}; "
            "see its documentation for the valid ones"
        ) from error


def _matrices(model: nn.Module) -> Iterator[Parameter]:
    """Yield the matrices of layers, and the stacks of them; the head is not one."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            yield module.weight
        elif isinstance(module, Experts):
            yield from module.matrices()


def _with_multipliers(
    groups: list[dict[str, Any]],
    multipliers: Mapping[str, Multipliers],
    model: nn.Module,
    *,
    eps: float | None,
) -> list[dict[str, Any]]:
    """Return the parameter groups of muP, and log what each kind of weight is multiplied by."""
    for kind, each in multipliers.items():
        logger.info(
            "muP: %s: initial values x %.4g, rate x %.4g, weight decay x %.4g, epsilon x %.4g; it %s",
            *(kind, each.std, each.rate, each.decay, each.epsilon, each.reason),
        )
    in_layers = {id(each) for name, each in named_logical_parameters(model) if name.startswith("layers.")}

    def of(parameter: Parameter) -> Multipliers:
        kind = parameter.logical.kind  # type: ignore[attr-defined]
        if kind is None:
            assert len(whole_shape_of(parameter)) < 2, "a matrix without a kind: name one in its init method"
            kind = "layer_vector" if id(parameter) in in_layers else "vector"
        return multipliers[kind]

    return split_by_multipliers(groups, of, eps=eps)
