"""Save a checkpoint: each rank writes one shard, then rank 0 writes the manifest and renames the folder."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from neox_config.facts.checkpoints import MANIFEST, checkpoint_name
from neox_model.checkpoint import directory as folders
from neox_model.checkpoint import rng_state
from neox_model.checkpoint.contents import Layout, Manifest, TensorRecord
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.logical import engine_fragments, is_written_here, optimizer_parts, weight_part
from neox_model.checkpoint.names import rng_prefix
from neox_model.checkpoint.outcome import collect, shared_outcome
from neox_model.checkpoint.parts import RunParts
from neox_model.checkpoint.replica_states import replica_parts
from neox_model.checkpoint.shards import Part, WrittenPiece, write_durably, write_shard
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import named_logical_parameters
from neox_model.versions import package_versions

__all__ = ["layout_of", "save_checkpoint"]

logger = logging.getLogger(__name__)

_SHARE_THE_FOLDER = "set save to a folder on a file system that all hosts share"


@dataclass(frozen=True, slots=True)
class _Shard:
    """The shard that one rank wrote, as sent to rank 0."""

    file: str
    size: int
    pieces: list[WrittenPiece]
    scalars: dict[str, dict[str, Any]]
    names: set[str]


def save_checkpoint(
    directory: Path,
    parts: RunParts,
    *,
    iteration: int,
    config: Mapping[str, Any],
    save_optimizer: bool = True,
    save_rng: bool = True,
    keep_last: int | None = None,
) -> Path:
    """Save a checkpoint of a training run. Collective over all ranks, which must share the folder.

    The checkpoint appears with the last rename. If any rank fails, the written files are removed and every
    rank raises.

    Args:
        directory: folder of the checkpoints and `latest`.
        parts: the run, between two iterations.
        iteration: finished updates; names the checkpoint.
        config: plain values that a later load compares with its own: the parameters by name, and derived
            values (`processes.recorded_values`).
        save_optimizer: save the optimizer's states.
        save_rng: save the random generators' states.
        keep_last: number of checkpoints to keep; older ones are deleted. None keeps all.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: the checkpoint could not be written on some rank; the same message on all ranks.
    """
    started, groups = time.perf_counter(), parts.groups
    final = directory / checkpoint_name(iteration)
    temporary = folders.unfinished(final)
    is_first = groups.world.rank == 0
    with _abandoned_on_failure(temporary, is_first=is_first):
        with shared_outcome(groups.control, f"saving {final}"):
            if is_first:
                folders.begin(temporary)
        with shared_outcome(groups.control, f"saving {final}"):
            shard = _write(temporary, parts, save_optimizer=save_optimizer, save_rng=save_rng)
        shards = collect(groups.control, shard)
        with shared_outcome(groups.control, f"saving {final}"):
            if is_first:
                manifest = Manifest(
                    iteration=iteration,
                    layout=layout_of(groups),
                    config=config,
                    tensors=_records(shards, temporary),
                    files={shard.file: shard.size for shard in shards},
                    optimizer=type(parts.engine.update.optimizer).__name__ if save_optimizer else None,
                    optimizer_scalars={
                        name: held for shard in shards for name, held in shard.scalars.items()
                    },
                    engine=parts.engine.state_dict(),
                    schedule={
                        "class": type(parts.schedule.curve).__name__,
                        "curve": asdict(parts.schedule.curve),
                        **parts.schedule.state_dict(),
                    },
                    training=parts.state.state_dict(),
                    packages=package_versions(),
                )
                write_durably(temporary / MANIFEST, manifest.to_json())
                folders.publish(temporary, final)
                if keep_last is not None:
                    folders.keep_newest(directory, keep_last, iteration)
                _log(final, manifest, time.perf_counter() - started)
    return final


def layout_of(groups: Groups) -> Layout:
    """Return the sizes of a run's parallel groups."""
    return Layout(data=groups.data.size, model=groups.model.size, pipe=groups.pipe.size)


@contextmanager
def _abandoned_on_failure(temporary: Path, *, is_first: bool) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        if is_first:
            folders.abandon(temporary)
        raise


def _write(folder: Path, run: RunParts, *, save_optimizer: bool, save_rng: bool) -> _Shard:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}, created by rank 0, is not visible here; {_SHARE_THE_FOLDER}")
    update, groups = run.engine.update, run.groups
    parts: list[Part] = []
    scalars: dict[str, dict[str, Any]] = {}
    for fragment in engine_fragments(run.engine):
        if is_written_here(fragment, groups, splits_over_data=update.splits_over_data):
            parts.append(weight_part(fragment))
            if save_optimizer:
                states, scalars[fragment.name] = optimizer_parts(fragment, update.optimizer)
                parts += states
        if save_optimizer and is_written_here(fragment, groups, splits_over_data=True):
            parts += replica_parts(fragment, update.optimizer)
    _check_finite(parts)
    if save_rng:
        parts += _rng_parts(groups.world.rank)
    file = f"shard-{groups.world.rank:05d}.safetensors"
    pieces, size = write_shard(folder / file, parts)
    names = {name for name, _ in named_logical_parameters(run.model)}
    return _Shard(file=file, size=size, pieces=pieces, scalars=scalars, names=names)


def _check_finite(parts: list[Part]) -> None:
    """Raise an error if weights or states contain values that are not finite.

    Raises:
        CheckpointError: an element is not finite.
    """
    parts = [part for part in parts if part.values.is_floating_point()]
    if not parts:
        return
    # Read together, with one synchronization.
    are_finite = torch.stack([part.values.isfinite().all() for part in parts]).tolist()
    broken = [part.name for part, is_finite in zip(parts, are_finite, strict=True) if not is_finite]
    if broken:
        more = f" and {len(broken) - 1:,} more tensors" if len(broken) > 1 else ""
        raise CheckpointError(
            f"found values that are not finite in {broken[0]}{more}; earlier checkpoints are kept"
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
    """Return all ranks' pieces by tensor.

    Raises:
        CheckpointError: a shard is not visible here, or the pieces do not form whole tensors.
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
        raise CheckpointError(f"the ranks together do not have all elements of {', '.join(incomplete)}")
    return records


def _log(final: Path, manifest: Manifest, seconds: float) -> None:
    megabytes = sum(manifest.files.values()) / 1e6
    logger.info("saved %s: %s MB in %.1f s", final, f"{megabytes:,.1f}", seconds)
