"""States of the model that are no weights, such as masks: written and read whole, by logical name."""

from collections.abc import Iterable, Sequence

from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.errors import CheckpointError, DamagedManifestError
from neox_model.checkpoint.logical import has_turn
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
        if has_turn(
            state.name,
            groups,
            splits_over_data=state.is_split_over_data,
            splits_over_model=state.is_split_over_model,
        )
    ]


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
    reader.check(
        (model_state_name(state.name), state.range, dtype if dtype.is_floating_point else None)
        for state, dtype in ((state, state.values.dtype) for state in states)
    )


def fill_model_states(states: Sequence[LogicalState], reader: ShardReader) -> None:
    """Read the states, which `check_model_states` has checked."""
    for state in states:
        reader.fill(state.values, model_state_name(state.name), state.range)
