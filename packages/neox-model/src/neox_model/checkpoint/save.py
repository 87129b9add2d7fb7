"""Writing a checkpoint: each rank its own shard, then one manifest, then one rename."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from neox_model.checkpoint import directory as folders
from neox_model.checkpoint import rng_state
from neox_model.checkpoint.contents import MANIFEST, Layout, Manifest, TensorRecord
from neox_model.checkpoint.engines import adapter_of, inner_optimizer, read_engine_state
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.logical import engine_fragments, is_written_here, optimizer_parts, weight_part
from neox_model.checkpoint.outcome import collect, shared_outcome
from neox_model.checkpoint.shards import Part, WrittenPiece, write_durably, write_shard
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import named_logical_parameters

__all__ = ["Restorable", "Schedule", "layout_of", "rng_prefix", "save_checkpoint"]

logger = logging.getLogger(__name__)

_SHARE_THE_FOLDER = "let save name a folder on a file system that all hosts share"


class Restorable(Protocol):
    """Something whose whole state is plain JSON values."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state back."""


class Schedule(Restorable, Protocol):
    """A learning-rate schedule whose `curve` is a dataclass of plain values."""

    curve: Any


@dataclass(frozen=True, slots=True)
class _Shard:
    """What one rank wrote, as it tells rank 0."""

    file: str
    size: int
    pieces: list[WrittenPiece]
    scalars: dict[str, dict[str, Any]]
    names: set[str]


def save_checkpoint(
    directory: Path,
    *,
    iteration: int,
    model: nn.Module,
    engine: Any,
    groups: Groups,
    schedule: Schedule,
    state: Restorable,
    config: Mapping[str, Any],
    save_optimizer: bool = True,
    save_rng: bool = True,
    keep_last: int | None = None,
) -> Path:
    """Write one checkpoint of a training run. Collective over all ranks, which must share the folder.

    Until the last rename the checkpoint is not there at all; when anything fails on any rank, what was
    written is removed and every rank raises.

    Args:
        directory: where the checkpoints and `latest` live.
        iteration: finished updates; names the checkpoint.
        model: the module inside the engine.
        engine: the DeepSpeed engine, between two iterations.
        groups: this rank's process groups.
        schedule: the learning-rate schedule.
        state: the training loop's state.
        config: flat parameter name to plain value, kept for the messages of a later load.
        save_optimizer: write the optimizer's states.
        save_rng: write the random generators' states.
        keep_last: delete older checkpoints beyond this many; None keeps all.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: it could not be written, on whichever rank; the message is the same on all.
    """
    started = time.perf_counter()
    final = directory / folders.checkpoint_name(iteration)
    temporary = folders.unfinished(final)
    is_first = groups.world.rank == 0
    with _abandoned_on_failure(temporary, is_first=is_first):
        with shared_outcome(groups.control, f"saving {final}"):
            if is_first:
                folders.begin(temporary)
        with shared_outcome(groups.control, f"saving {final}"):
            shard = _write(temporary, model, engine, groups, save_optimizer=save_optimizer, save_rng=save_rng)
        shards = collect(groups.control, shard)
        with shared_outcome(groups.control, f"saving {final}"):
            if is_first:
                manifest = Manifest(
                    iteration=iteration,
                    layout=layout_of(groups),
                    config=config,
                    tensors=_records(shards, temporary),
                    files={shard.file: shard.size for shard in shards},
                    optimizer=type(inner_optimizer(engine.optimizer)).__name__ if save_optimizer else None,
                    optimizer_scalars={
                        name: held for shard in shards for name, held in shard.scalars.items()
                    },
                    engine=read_engine_state(engine),
                    schedule={"curve": asdict(schedule.curve), **schedule.state_dict()},
                    training=state.state_dict(),
                )
                write_durably(temporary / MANIFEST, manifest.to_json())
                folders.publish(temporary, final)
                if keep_last is not None:
                    folders.keep_newest(directory, keep_last, iteration)
                _log(final, manifest, time.perf_counter() - started)
    return final


def layout_of(groups: Groups) -> Layout:
    """The sizes of a run's parallel groups."""
    return Layout(data=groups.data.size, model=groups.model.size, pipe=groups.pipe.size)


def rng_prefix(rank: int) -> str:
    """Start of the tensor names of a rank's random generators."""
    return f"rng/{rank}/"


@contextmanager
def _abandoned_on_failure(temporary: Path, *, is_first: bool) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        if is_first:
            folders.abandon(temporary)
        raise


def _write(
    folder: Path, model: nn.Module, engine: Any, groups: Groups, *, save_optimizer: bool, save_rng: bool
) -> _Shard:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}, made by rank 0, is not visible here; {_SHARE_THE_FOLDER}")
    splits_over_data = adapter_of(engine.optimizer).splits_over_data
    parts: list[Part] = []
    scalars: dict[str, dict[str, Any]] = {}
    for fragment in engine_fragments(model, engine):
        if is_written_here(fragment, groups, splits_over_data=splits_over_data):
            parts.append(weight_part(fragment))
            if save_optimizer:
                states, scalars[fragment.name] = optimizer_parts(fragment, inner_optimizer(engine.optimizer))
                parts += states
    _check_finite(parts)
    if save_rng:
        parts += _rng_parts(groups.world.rank)
    file = f"shard-{groups.world.rank:05d}.safetensors"
    pieces, size = write_shard(folder / file, parts)
    names = {name for name, _ in named_logical_parameters(model)}
    return _Shard(file=file, size=size, pieces=pieces, scalars=scalars, names=names)


def _check_finite(parts: list[Part]) -> None:
    """Refuse to write weights and states that no training can continue from.

    Raises:
        CheckpointError: an element is not finite.
    """
    parts = [part for part in parts if part.values.is_floating_point()]
    if not parts:
        return
    # Read together: one wait for the device.
    are_finite = torch.stack([part.values.isfinite().all() for part in parts]).tolist()
    broken = [part.name for part, is_finite in zip(parts, are_finite, strict=True) if not is_finite]
    if broken:
        more = f" and {len(broken) - 1:,} more tensors" if len(broken) > 1 else ""
        raise CheckpointError(
            f"{broken[0]}{more} held values that are not finite; earlier checkpoints are kept"
        )


def _rng_parts(rank: int) -> list[Part]:
    return [
        Part(
            name=rng_prefix(rank) + name,
            shape=tuple(values.shape),
            block=((0, values.numel()),),
            start=0,
            values=values,
        )
        for name, values in rng_state.capture().items()
    ]


def _records(shards: list[_Shard], folder: Path) -> dict[str, TensorRecord]:
    """All ranks' pieces by tensor.

    Raises:
        CheckpointError: a shard is not visible here, or the pieces do not add up to whole tensors.
    """
    pieces: dict[str, list[WrittenPiece]] = defaultdict(list)
    for shard in shards:
        path = folder / shard.file
        if not path.is_file() or path.stat().st_size != shard.size:
            raise CheckpointError(
                f"{path}, written by another process, is not visible here; {_SHARE_THE_FOLDER}"
            )
        for piece in shard.pieces:
            pieces[piece.name].append(piece)
    records = {
        name: TensorRecord(
            shape=parts[0].shape, dtype=parts[0].dtype, pieces=tuple(part.piece for part in parts)
        )
        for name, parts in pieces.items()
    }
    expected = set().union(*(shard.names for shard in shards))
    incomplete = sorted(expected - records.keys()) + [
        name for name, record in records.items() if not record.is_complete
    ]
    if incomplete:
        raise CheckpointError(f"the ranks together do not hold all of {', '.join(incomplete)}")
    return records


def _log(final: Path, manifest: Manifest, seconds: float) -> None:
    megabytes = sum(manifest.files.values()) / 1e6
    logger.info("saved %s: %s MB in %.1f s", final, f"{megabytes:,.1f}", seconds)
