"""Verify a checkpoint: its files, its manifest, and every value."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neox_config.facts.checkpoints import MANIFEST, iteration_of
from neox_config.pluralize import first_few
from neox_model.checkpoint import rng_state
from neox_model.checkpoint.comparison import stored_curve, training_state
from neox_model.checkpoint.contents import Manifest, TensorRecord
from neox_model.checkpoint.dtypes import DTYPES
from neox_model.checkpoint.errors import CheckpointError, DamagedCheckpointError, quoted
from neox_model.checkpoint.names import in_model_order, is_random_state, rng_prefix
from neox_model.checkpoint.shard_file import ShardFile
from neox_model.checkpoint.shards import ShardReader

__all__ = ["Soundness", "examine"]

_SLICE = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Soundness:
    """Result of the verification of one checkpoint.

    Args:
        folder: the checkpoint.
        problems: what is wrong, each with its file or tensor; empty if the checkpoint is sound.
        notes: what is unusual and does no harm.
        tensors: number of tensors.
        num_bytes: size of the shards.
    """

    folder: Path
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()
    tensors: int = 0
    num_bytes: int = 0

    @property
    def is_sound(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.problems

    def plain(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return {
            "folder": str(self.folder),
            "is_sound": self.is_sound,
            "problems": list(self.problems),
            "notes": list(self.notes),
            "tensors": self.tensors,
            "bytes": self.num_bytes,
        }


def examine(folder: Path) -> Soundness:
    """Verify one checkpoint, reading one piece of a tensor at a time."""
    try:
        manifest = Manifest.read(folder)
    except CheckpointError as error:
        return Soundness(folder=folder, problems=(str(error),))
    damaged: dict[str, str] = {}
    for name, size in manifest.files.items():
        try:
            ShardFile(folder / name, size)
        except CheckpointError as error:
            damaged[name] = str(error)
    problems = [*_manifest_problems(folder, manifest), *damaged.values()]
    reader = ShardReader(folder, manifest)
    for name in in_model_order(manifest.tensors):
        problems += _tensor_problems(name, manifest.tensors[name], reader, damaged)
    if not problems:
        problems += _random_problems(manifest, reader)
    names = sorted({path.name for path in folder.iterdir()} - {MANIFEST, *manifest.files})
    others = first_few([quoted(name) for name in names], 3)
    notes = [f"{folder} has files that are not part of the checkpoint: {others}"] if others else []
    return Soundness(
        folder=folder,
        # Each piece of a damaged shard has the same problem.
        problems=tuple(dict.fromkeys(problems)),
        notes=tuple(notes),
        tensors=len(manifest.tensors),
        num_bytes=sum(manifest.files.values()),
    )


def _manifest_problems(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yield what is wrong in a manifest whose checksum is right."""
    path, named = folder / MANIFEST, iteration_of(folder.absolute().name)
    if named not in (None, manifest.iteration):
        yield f"{path} is of iteration {manifest.iteration:,}, but its folder is named {folder.name}"
    for name, record in manifest.tensors.items():
        if not record.is_complete:
            yield f"{path}: the pieces of {quoted(name)} are not the whole tensor"
    numbers = {f"engine / {quoted(name)}": value for name, value in manifest.engine.items()}
    for name, states in manifest.optimizer_scalars.items():
        for key, state in states.items():
            numbers[f"optimizer_scalars / {quoted(name)} / {quoted(key)}"] = state["value"]
    for what, value in numbers.items():
        if not math.isfinite(value or 0.0):
            yield f"{path}: {what} is {value}"
    for check in (stored_curve, training_state):
        try:
            check(manifest)
        except CheckpointError as error:
            yield f"{path}: {error}"


def _tensor_problems(
    name: str, record: TensorRecord, reader: ShardReader, damaged: dict[str, str]
) -> Iterator[str]:
    """Yield what is wrong with the values of a tensor, except in shards that are damaged as a whole."""
    broken: dict[str, int] = defaultdict(int)
    for piece in record.pieces:
        if piece.file in damaged:
            continue
        try:
            values = reader.read(piece, record.dtype)
        except DamagedCheckpointError as error:
            yield str(error)
            continue
        if DTYPES[record.dtype].is_floating_point:
            for part in values.split(_SLICE):
                broken["NaN"] += int(part.isnan().sum())
                broken["infinite"] += int(part.isinf().sum())
    found = [f"{count:,} {what}" for what, count in broken.items() if count]
    if found:
        files = ", ".join(sorted({piece.file for piece in record.pieces}))
        yield f"{quoted(name)} ({files}) has {' and '.join(found)} values"


def _random_problems(manifest: Manifest, reader: ShardReader) -> Iterator[str]:
    """Yield which ranks' random generators cannot be restored, if any were saved."""
    layout = manifest.layout
    if not any(map(is_random_state, manifest.tensors)):
        return
    for rank in range(layout.data * layout.model * layout.pipe):
        try:
            if rng_state.read(manifest, reader, rank) is None:
                yield f"the manifest has random generators, but none of rank {rank} ({rng_prefix(rank)}...)"
        except DamagedCheckpointError as error:
            yield f"rank {rank}: {error}"
