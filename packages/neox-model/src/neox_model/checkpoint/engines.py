"""Where each engine keeps the master weights, and how they are copied back into the model.

The optimizer is wrapped by ours at ZeRO stage 0, and by one of DeepSpeed's three classes at the other stages;
each of those cuts and flattens the parameters its own way. One adapter per class lists, for this rank, which
run of which parameter lies where in which optimizer tensor. Everything else (names, states, files) is the
same for all.

Wrappers are recognised by class name, so that reading weights alone never imports DeepSpeed.
Source: DeepSpeed 0.19.8, `runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py`,
`runtime/bf16_optimizer.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from neox_model.checkpoint.errors import CheckpointError

__all__ = [
    "Adapter",
    "Held",
    "adapter_of",
    "inner_optimizer",
    "read_engine_state",
    "restore_engine_state",
    "scalar_device",
]


@dataclass(frozen=True, slots=True)
class Held:
    """A run of one parameter's local elements and the optimizer tensor that holds their master copy.

    Args:
        param: the model's parameter.
        start: first element of the run, row-major in the parameter's local tensor.
        numel: length of the run.
        holder: the optimizer's tensor; also the key of the optimizer's states.
        offset: first element of the run in `holder`, flat.
    """

    param: Parameter
    start: int
    numel: int
    holder: Tensor
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """How one kind of engine holds its weights.

    Args:
        held: lists this rank's runs.
        to_model: copies the masters into the weights that the model computes with; collective.
        splits_over_data: whether each data-parallel rank holds another part (ZeRO), or all hold the same.
    """

    held: Callable[[Any], Iterator[Held]]
    to_model: Callable[[Any], None]
    splits_over_data: bool


def adapter_of(optimizer: Any) -> Adapter:
    """The adapter for an engine's optimizer.

    Raises:
        CheckpointError: the optimizer's class is not known, or its states live on NVMe.
    """
    if getattr(optimizer, "swap_optimizer", False):
        raise CheckpointError(
            "optimizer states offloaded to nvme cannot be checkpointed; "
            "set offload_optimizer.device: cpu, or save: null"
        )
    names = [base.__name__ for base in type(optimizer).__mro__]
    for name in names:
        if name in _ADAPTERS:
            return _ADAPTERS[name]
    raise CheckpointError(
        f"no adapter for the engine's optimizer {names[0]}; known are {', '.join(_ADAPTERS)}"
    )


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer that keeps the states, inside DeepSpeed's wrapper or itself."""
    return getattr(optimizer, "optimizer", optimizer)


def _held_as_is(optimizer: Any) -> Iterator[Held]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield Held(param, 0, param.numel(), param, 0)


def _held_as_masters(optimizer: Any) -> Iterator[Held]:
    for param, master in zip(optimizer.parameters, optimizer.masters, strict=True):
        yield Held(param, 0, param.numel(), master, 0)


def _held_bf16(optimizer: Any) -> Iterator[Held]:
    return _held_by_mapping(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition)


def _held_zero_1_and_2(optimizer: Any) -> Iterator[Held]:
    return _held_by_mapping(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups)


def _held_by_mapping(groups: list[list[Parameter]], partitions: list[Tensor]) -> Iterator[Held]:
    """Runs as DeepSpeed's own fragment addresses give them; None where another rank holds the parameter."""
    for params, partition in zip(groups, partitions, strict=True):
        for param in params:
            mapping: Any = param._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:
                here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield Held(param, here.start, here.numel, partition, there.start)


def _held_zero_3(optimizer: Any) -> Iterator[Held]:
    """Each parameter is padded and cut into one equal run per data-parallel rank."""
    for index, (params, flat) in enumerate(
        zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    ):
        rank = optimizer._get_sub_group_partition_rank(index)
        offset = 0
        for param in params:
            length = param.partition_numel()
            start = rank * length
            numel = min(length, param.ds_numel - start)
            if numel > 0:
                yield Held(param, start, numel, flat, offset)
            offset += length


def _nothing(optimizer: Any) -> None:
    """The optimizer works on the model's own weights."""


def _masters_to_model(optimizer: Any) -> None:
    optimizer.to_model()


def _partition_to_model(optimizer: Any) -> None:
    optimizer.update_lp_params()


def _zero_3_to_model(optimizer: Any) -> None:
    optimizer.checkpoint_event_prologue()
    for index, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        optimizer.fp16_partitioned_groups_flat[index].data.copy_(flat.data)
        optimizer._unflatten_partitioned_parameters(index)
    optimizer.checkpoint_event_epilogue()


_ADAPTERS = {
    "Optimizer": Adapter(held=_held_as_is, to_model=_nothing, splits_over_data=False),
    "MixedPrecisionOptimizer": Adapter(
        held=_held_as_masters, to_model=_masters_to_model, splits_over_data=False
    ),
    "BF16_Optimizer": Adapter(held=_held_bf16, to_model=_partition_to_model, splits_over_data=True),
    "DeepSpeedZeroOptimizer": Adapter(
        held=_held_zero_1_and_2, to_model=_partition_to_model, splits_over_data=True
    ),
    "DeepSpeedZeroOptimizer_Stage3": Adapter(
        held=_held_zero_3, to_model=_zero_3_to_model, splits_over_data=True
    ),
}

# Optimizers that keep single-number states on the weights' device, whatever their arguments.
_NUMBERS_BESIDE_WEIGHTS = {"ASGD"}

_COUNTERS = ("global_steps", "global_samples")
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def read_engine_state(engine: Any) -> dict[str, Any]:
    """Read the engine's counters and its loss scale."""
    counters = {name: int(getattr(engine, name)) for name in _COUNTERS}
    own, scaler = _own_loss_scale(engine.optimizer), getattr(engine.optimizer, "loss_scaler", None)
    if own is not None and own.settings.is_dynamic:
        return counters | own.state_dict()
    # DeepSpeed's ZeRO has a scaler that stays at 1 in every other precision.
    if getattr(scaler, "dynamic", False):
        return counters | {name: getattr(scaler, name) for name in _LOSS_SCALE}
    return counters


def restore_engine_state(engine: Any, state: Mapping[str, Any], *, loss_scale: bool) -> None:
    """Put back what `read_engine_state` read; numbers that this engine does not have are left out.

    Args:
        engine: the DeepSpeed engine.
        state: from the checkpoint.
        loss_scale: whether the loss scale continues from the checkpoint's.
    """
    for name in _COUNTERS:
        setattr(engine, name, state[name])
    own, scaler = _own_loss_scale(engine.optimizer), getattr(engine.optimizer, "loss_scaler", None)
    if not loss_scale or state.get("cur_iter") is None:
        return
    if own is not None:
        own.load_state_dict(state)
    elif getattr(scaler, "dynamic", False):
        for name in _LOSS_SCALE:
            setattr(scaler, name, state[name])


def _own_loss_scale(optimizer: Any) -> Any:
    """Our loss scale at stage 0, None elsewhere: DeepSpeed's attribute of that name is a number."""
    own = getattr(optimizer, "loss_scale", None)
    return own if hasattr(own, "load_state_dict") else None


def scalar_device(optimizer: Any, holder: Tensor) -> torch.device:
    """Where a torch optimizer expects single-number states such as `step`."""
    on_device = type(optimizer).__name__ in _NUMBERS_BESIDE_WEIGHTS or any(
        group.get("fused") or group.get("capturable") for group in optimizer.param_groups
    )
    return holder.device if on_device else torch.device("cpu")
