"""States of the model that are no weights, such as masks: written and read whole, by logical name."""

import zlib
from collections.abc import Iterable, Sequence
from math import prod

from neox_model.checkpoint.blocks import Range
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.errors import CheckpointError, DamagedManifestError
from neox_model.checkpoint.names import model_state_name
from neox_model.checkpoint.shards import Part, ShardReader
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import LogicalState

__all__ = ["check_model_states", "fill_model_states", "model_state_parts"]


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
        if _is_written_here(state, groups)
    ]


def _is_written_here(state: LogicalState, groups: Groups) -> bool:
    turn = zlib.crc32(state.name.encode())
    writes_data = state.is_split_over_data or turn % groups.data.size == groups.data.rank
    model_turn = turn // groups.data.size % groups.model.size
    return writes_data and (state.is_split_over_model or model_turn == groups.model.rank)


def check_model_states(states: Sequence[LogicalState], manifest: Manifest, reader: ShardReader) -> None:
    """Check that the states can be read from a checkpoint.

    Raises:
        CheckpointError: the checkpoint has not all of them.
        DamagedCheckpointError: one has another shape, or is damaged.
    """
    for state in states:
        record = manifest.tensors.get(model_state_name(state.name))
        if record is None:
            raise CheckpointError(
                f"the checkpoint does not contain {state.name}, because compression_training or eigenvalue "
                "had other values when it was saved; set finetune: true to start from its weights"
            )
        if record.shape != state.shape:
            raise DamagedManifestError(f"{state.name} has the shape {record.shape} instead of {state.shape}")
    reader.check_sums((manifest.tensors[model_state_name(state.name)], _range(state)) for state in states)
    for state in states:
        dtype = state.values.dtype if state.values.is_floating_point() else None
        reader.check(state.name, manifest.tensors[model_state_name(state.name)], _range(state), dtype)


def fill_model_states(states: Sequence[LogicalState], manifest: Manifest, reader: ShardReader) -> None:
    """Read the states, which `check_model_states` has checked."""
    for state in states:
        reader.fill(state.values, state.name, manifest.tensors[model_state_name(state.name)], _range(state))


def _range(state: LogicalState) -> Range:
    assert state.start + state.values.numel() <= prod(stop - start for start, stop in state.slices)
    return state.slices, state.start, state.start + state.values.numel()
