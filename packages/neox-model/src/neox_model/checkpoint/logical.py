"""Map this rank's weights, optimizer states and states of the model to logical tensors.

A fragment is a run of one logical weight on this rank. Its optimizer states are at the same offset of tensors
of the same shape, so one description serves the weight and its states. States of the model that are no
weights, such as masks, describe themselves.
"""

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from neox_model.checkpoint.blocks import Block, Range, block_numel, whole_block
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.dtypes import DTYPE_NAMES, DTYPES
from neox_model.checkpoint.errors import CheckpointError, DamagedManifestError, quoted
from neox_model.checkpoint.names import model_state_name
from neox_model.checkpoint.shards import Part, ShardReader
from neox_model.engine.contract import Engine
from neox_model.parallel.control import all_gather_object
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import (
    Logical,
    LogicalState,
    is_stage_copy,
    model_states,
    named_logical_parameters,
)
from neox_model.parallel.param_shard import ParamShard

__all__ = [
    "Fragment",
    "check_model_states",
    "check_scalars",
    "computing_fragments",
    "copy_model_states",
    "engine_fragments",
    "fill_model_states",
    "is_written_here",
    "model_fragments",
    "model_state_parts",
    "optimizer_parts",
    "restore_scalars",
    "state_range",
    "state_tensor",
]

# Optimizers that keep single-number states on the weights' device regardless of their arguments.
_NUMBERS_BESIDE_WEIGHTS = {"ASGD"}


@dataclass(frozen=True, slots=True)
class Fragment:
    """A run of one logical weight on this rank, without padding rows."""

    name: str
    logical: Logical
    held: ParamShard

    @property
    def range(self) -> Range:
        """Return the run as a range of this rank's block."""
        return self.logical.slices, self.held.start, self.held.start + self.held.numel

    @property
    def is_whole(self) -> bool:
        """Return True if the optimizer's tensor is the whole weight, in its shape."""
        holder = self.held.holder
        return tuple(holder.shape) == self.logical.shape and holder.numel() == self.held.numel

    @property
    def rows(self) -> Block | None:
        """Return the block of the weight that the optimizer's tensor is, if it is one: a run of whole rows.

        It is all rows of this rank's block or, under the torch engine's ZeRO, those of this data-parallel
        rank. The tensor may have padding after it.
        """
        held, shape = self.held, tuple(self.held.holder.shape)
        if held.offset or len(shape) != len(held.local_shape) or shape[1:] != held.local_shape[1:]:
            return None
        row_size = prod(shape[1:])
        first, last = held.start // row_size, (held.start + held.numel) // row_size
        if (first * row_size, last * row_size) != (held.start, held.start + held.numel):
            return None
        (start, _), *others = self.logical.slices or ((0, 1),)
        return (start + first, start + last), *others

    def slices_along(self, dims: tuple[int, ...], rows: Block) -> tuple[tuple[int, ...], Block]:
        """Return the shape of a state with one value per slice along dimensions, whole and of these rows."""
        shape = tuple(length if each in dims else 1 for each, length in enumerate(self.logical.shape))
        return shape, tuple(bounds if each in dims else (0, 1) for each, bounds in enumerate(rows))

    @property
    def weight(self) -> Tensor:
        """Return a 1-D view of the run's weights, of the float32 master weights if there are any."""
        return self.part_of(self.held.holder)

    def as_part(self, name: str, values: Tensor) -> Part:
        """Return values of the run's elements, 1-D, as a part to write."""
        shape, block = self.logical.shape, self.logical.slices
        return Part(name=name, shape=shape, block=block, start=self.held.start, values=values)

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return a 1-D view of the run's elements of a tensor with the holder's shape."""
        return tensor.detach().view(-1).narrow(0, self.held.offset, self.held.numel)


def model_fragments(model: nn.Module) -> list[Fragment]:
    """Return the weights of a model without an engine, one fragment each, without those of a base."""
    trained = (param for param in model.parameters() if param.requires_grad)
    held = (ParamShard(param, 0, param.numel(), param, 0, tuple(param.shape)) for param in trained)
    return _fragments(model, held)


def engine_fragments(engine: Engine) -> list[Fragment]:
    """Return the master weights that this rank holds, in the order of the optimizer."""
    return _fragments(engine.model, engine.update.param_shards())


def computing_fragments(engine: Engine) -> list[Fragment]:
    """Return the weights that the model computes with, except those partitioned by ZeRO 3."""
    return _fragments(engine.model, engine.computing_weights())


def _fragments(model: nn.Module, held: Iterator[ParamShard]) -> list[Fragment]:
    names = {id(param): name for name, param in named_logical_parameters(model)}
    found = []
    for run in held:
        name, logical = names[id(run.param)], run.param.logical  # type: ignore[attr-defined]
        block_shape = tuple(stop - start for start, stop in logical.slices)
        if run.local_shape[1:] != block_shape[1:]:
            raise CheckpointError(
                f"{name}: the local shape {run.local_shape} does not match the block {block_shape}"
            )
        # Without the padding rows after the block.
        numel = min(run.numel, block_numel(logical.slices) - run.start)
        if numel > 0:
            found.append(Fragment(name, logical, replace(run, numel=numel)))
    return found


def is_written_here(fragment: Fragment, groups: Groups, *, splits_over_data: bool) -> bool:
    """Return True if this rank writes the fragment; a tied weight is written by its owner's stage."""
    return not is_stage_copy(fragment.held.param) and _has_turn(
        fragment.name,
        groups,
        splits_over_data=splits_over_data,
        splits_over_model=fragment.logical.model_parallel,
        is_expert=fragment.logical.is_expert,
    )


def _has_turn(
    name: str, groups: Groups, *, splits_over_data: bool, splits_over_model: bool, is_expert: bool
) -> bool:
    """Return True if this rank writes a tensor: of the ranks with the same values, a hash selects one."""
    turn, copies = zlib.crc32(name.encode()), groups.copies_of(is_expert=is_expert)
    writes_data = splits_over_data or turn % copies.size == copies.rank
    return writes_data and (splits_over_model or turn // copies.size % groups.model.size == groups.model.rank)


def optimizer_parts(fragment: Fragment, optimizer: Any) -> tuple[list[Part], dict[str, Any]]:
    """Return the optimizer's states of a fragment.

    Args:
        fragment: the fragment of a weight.
        optimizer: the optimizer with the states, unwrapped.

    Returns:
        The tensor states, as parts named `NAME/STATE` (states with one value per element of the weight,
        states with one value per slice, and states of any other shape if this rank holds the whole weight),
        and the single-number states. Those that differ between replicas are left out (see
        `replica_states.py`).

    Raises:
        CheckpointError: a state has none of these forms.
    """
    parts: list[Part] = []
    scalars: dict[str, Any] = {}
    for key, value in optimizer.state.get(fragment.held.holder, {}).items():
        if key in getattr(optimizer, "replica_states", {}):
            continue
        name = f"{fragment.name}/{key}"
        along, rows = _dimensions(optimizer, key), fragment.rows
        if isinstance(value, Tensor) and along is not None and rows is not None:
            shape, block = fragment.slices_along(along, rows)
            # Of the ranks that share the slices, only the first has it.
            if not any(start for each, (start, _) in enumerate(rows) if each not in along):
                values = value.detach().reshape(-1)[: block_numel(block)]
                parts.append(Part(name=name, shape=shape, block=block, start=0, values=values))
        elif isinstance(value, Tensor) and value.shape == fragment.held.holder.shape and key != "step":
            parts.append(fragment.as_part(name, fragment.part_of(value)))
        elif isinstance(value, Tensor) and value.dim() == 0:
            scalars[key] = {"value": value.item(), "dtype": DTYPE_NAMES[value.dtype]}
        elif isinstance(value, int | float | None):
            scalars[key] = {"value": value, "dtype": None}
        elif isinstance(value, Tensor) and fragment.is_whole:
            shape = tuple(value.shape)
            values = value.detach().reshape(-1)
            parts.append(Part(name=name, shape=shape, block=whole_block(shape), start=0, values=values))
        else:
            is_tensor = isinstance(value, Tensor)
            kind = f"a tensor of shape {tuple(value.shape)}" if is_tensor else type(value).__name__
            raise CheckpointError(
                f"the state {key!r} of {fragment.name} in {type(optimizer).__name__} is {kind}; only "
                "a single number, one value per weight, or a state of a weight that is whole on a rank "
                "can be saved; set no-save-optim: true"
            )
    return parts, scalars


def _dimensions(optimizer: Any, key: str) -> tuple[int, ...] | None:
    """Return the dimensions along which a state has one value per slice; None for other states."""
    return getattr(optimizer, "slice_states", {}).get(key)


def state_range(fragment: Fragment, optimizer: Any, key: str, shape: tuple[int, ...]) -> Range:
    """Return the range of a fragment's part in a whole optimizer state.

    Args:
        fragment: the fragment of a weight.
        optimizer: the optimizer with the state, unwrapped.
        key: the state's name.
        shape: shape of the whole state in the checkpoint.

    Raises:
        CheckpointError: the state does not have one value per weight, and this rank holds only a part of the
            weight.
        DamagedCheckpointError: a state with one value per slice has another shape, or the weight has no such
            slices.
    """
    along = _dimensions(optimizer, key)
    if along is not None and along[0] >= len(fragment.logical.shape):
        raise DamagedManifestError(
            f"the state {quoted(key)!r} of {fragment.name} has one value per slice "
            f"along dimension {along[0]}, and the weight has the shape {fragment.logical.shape}"
        )
    rows = fragment.rows
    if along is not None and rows is not None:
        expected, block = fragment.slices_along(along, rows)
        if shape != expected:
            raise DamagedManifestError(
                f"the state {quoted(key)!r} of {fragment.name} has the shape {shape} instead of {expected}"
            )
        return block, 0, block_numel(block)
    if shape == fragment.logical.shape:
        return fragment.range
    if not fragment.is_whole:
        raise CheckpointError(
            f"the state {key!r} of {fragment.name} requires the whole weight, but this rank holds a part; "
            "set model-parallel-size: 1 and zero_optimization.stage: 0, or no-load-optim: true"
        )
    return whole_block(shape), 0, prod(shape)


def state_tensor(fragment: Fragment, optimizer: Any, key: str, shape: tuple[int, ...]) -> Tensor:
    """Return the memory of the fragment's part of a state, 1-D, allocated if the optimizer has none yet.

    Args:
        fragment: the fragment of a weight.
        optimizer: the optimizer with the state, unwrapped.
        key: the state's name.
        shape: shape of the whole state in the checkpoint, which `state_range` has checked.
    """
    holder, state = fragment.held.holder, optimizer.state[fragment.held.holder]
    along = _dimensions(optimizer, key)
    if along is not None:
        if key not in state:
            local = [length if dim in along else 1 for dim, length in enumerate(holder.shape)]
            state[key] = holder.new_zeros(local)
        rows = fragment.rows
        assert rows is not None, "state_range refuses others"
        _, block = fragment.slices_along(along, rows)
        return state[key].view(-1)[: block_numel(block)]
    if shape == fragment.logical.shape:
        if key not in state:
            state[key] = torch.zeros_like(holder, dtype=getattr(optimizer, "state_dtype", None))
        return fragment.part_of(state[key])
    if key not in state:
        state[key] = torch.zeros(shape, dtype=holder.dtype, device=holder.device)
    return state[key].view(-1)


def check_scalars(
    fragments: list[Fragment], saved: Mapping[str, Mapping[str, Any]], *, same_class: bool
) -> None:
    """Check that `restore_scalars` can restore the single-number states.

    Raises:
        CheckpointError: weights that share an optimizer tensor have different states.
        DamagedCheckpointError: a state cannot be converted.
    """
    for _, names in _names_by_holder(fragments):
        numbers = [saved.get(name, {}) for name in names]
        if any(number != numbers[0] for number in numbers):
            raise CheckpointError(
                f"the optimizer states of {', '.join(names)} have different update counts, which one flat "
                "partition cannot store; set no-load-optim: true, or zero_optimization.stage: 0",
                code="different-counts",
            )
        for key, number in numbers[0].items():
            if not same_class and (number["value"] is None or not math.isfinite(number["value"])):
                raise DamagedManifestError(f"the state {quoted(key)!r} of {names[0]} is not a finite number")


def restore_scalars(
    fragments: list[Fragment], optimizer: Any, saved: Mapping[str, Mapping[str, Any]], *, same_class: bool
) -> None:
    """Restore the single-number states, which `check_scalars` has compared.

    Args:
        fragments: this rank's fragments.
        optimizer: the optimizer with the states, unwrapped.
        saved: weight name to its states.
        same_class: True if this optimizer's class wrote the states; otherwise they are converted.
    """
    is_beside_weights = type(optimizer).__name__ in _NUMBERS_BESIDE_WEIGHTS or any(
        group.get("fused") or group.get("capturable") for group in optimizer.param_groups
    )
    is_of_torch = type(optimizer).__module__.startswith("torch.optim")
    for holder, names in _names_by_holder(fragments):
        device = holder.device if is_beside_weights else torch.device("cpu")
        for key, number in saved.get(names[0], {}).items():
            value, dtype = number["value"], number["dtype"]
            if not same_class:
                # Torch's optimizers count in float32 tensors, DeepSpeed's in plain integers.
                value, dtype = (value, "F32") if is_of_torch else (int(value), None)
            if dtype is not None:
                value = torch.tensor(value, dtype=DTYPES[dtype], device=device)
            optimizer.state[holder][key] = value


def _names_by_holder(fragments: list[Fragment]) -> Iterator[tuple[Tensor, list[str]]]:
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for fragment in fragments:
        found.setdefault(id(fragment.held.holder), (fragment.held.holder, []))[1].append(fragment.name)
    yield from found.values()


def model_state_parts(states: Iterable[LogicalState], groups: Groups) -> list[Part]:
    """Return the states that this rank writes; a hash of the name selects one of the ranks with copies."""
    return [
        Part(
            name=model_state_name(state.name),
            shape=state.shape,
            block=state.slices,
            start=state.start,
            values=state.values,
        )
        for state in states
        if not state.is_stage_copy
        and _has_turn(
            state.name,
            groups,
            splits_over_data=state.is_split_over_data,
            splits_over_model=state.is_split_over_model,
            is_expert=state.is_expert,
        )
    ]


def check_model_states(states: Sequence[LogicalState], manifest: Manifest, reader: ShardReader) -> None:
    """Check that the states can be read from a checkpoint.

    Raises:
        CheckpointError: the checkpoint has not all of them.
        DamagedCheckpointError: one has another shape, or is damaged.
    """
    for state in states:
        record = manifest.tensors.get(_read_name(state, reader))
        if record is None:
            raise CheckpointError(
                f"the checkpoint does not contain {state.name}, because compression_training, "
                "moe_expert_bias or eigenvalue "
                "had other values when it was saved; set finetune: true to start from its weights"
            )
        if record.shape != state.shape:
            raise DamagedManifestError(f"{state.name} has the shape {record.shape} instead of {state.shape}")
    reader.check(
        (_read_name(state, reader), state.range, dtype if dtype.is_floating_point else None)
        for state, dtype in ((state, state.values.dtype) for state in states)
    )


def copy_model_states(states: Iterable[LogicalState], target: nn.Module, groups: Groups) -> None:
    """Copy states, by name, to a model that other ranks may hold in other parts. Collective over all ranks.

    Args:
        states: those of this rank's part of the source; small ones, because every rank receives all.
        target: receives those that it has.
        groups: this job's process groups.
    """
    gathered = all_gather_object(groups.control, {state.name: state.values.tolist() for state in states})
    values = {name: value for each in gathered for name, value in each.items()}
    for state in model_states(target):
        if state.name in values:
            state.values.copy_(torch.tensor(values[state.name]))


def fill_model_states(states: Sequence[LogicalState], reader: ShardReader) -> None:
    """Read the states, which `check_model_states` has checked."""
    for state in states:
        reader.fill(state.values, _read_name(state, reader), state.range)


def _read_name(state: LogicalState, reader: ShardReader) -> str:
    """Return the name of the tensor from which a state is read."""
    name = model_state_name(state.name)
    return name if state.if_missing is None or name in reader else state.if_missing
