"""Rewriting a checkpoint of one process, with checksums that fit the changed contents."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from neox_config.facts.checkpoints import MANIFEST
from neox_model.checkpoint.contents import Manifest, TensorRecord
from neox_model.checkpoint.shards import Part, write_shard

__all__ = ["edit_manifest", "edit_tensors", "write_tensors"]


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a checkpoint whose one shard holds each of them in one piece.

    Args:
        folder: the checkpoint.
        change: gets the tensors by logical name, and changes the dictionary.
    """
    manifest = Manifest.read(folder)
    (name,) = manifest.files
    tensors = load_file(folder / name)
    change(tensors)
    (folder / name).unlink()
    records, size = write_tensors(folder / name, tensors)
    _write(folder, replace(manifest, tensors=records, files={name: size}))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, TensorRecord], int]:
    """Write a shard that holds whole tensors.

    Returns:
        Their records for the manifest, and the size of the shard.
    """
    parts = [
        Part(
            name=name,
            shape=tuple(values.shape),
            block=tuple((0, length) for length in values.shape),
            start=0,
            values=values.reshape(-1),
        )
        for name, values in tensors.items()
    ]
    written, size = write_shard(path, parts)
    records = {
        one.name: TensorRecord(shape=one.shape, dtype=one.dtype, pieces=(one.piece,)) for one in written
    }
    return records, size


def edit_manifest(
    folder: Path, part: str, values: Mapping[str, Any], *, without: Collection[str] = ()
) -> None:
    """Change entries in one part of a checkpoint's manifest.

    Args:
        folder: the checkpoint.
        part: training, engine, schedule or optimizer_scalars.
        values: the new ones.
        without: entries to remove.
    """
    manifest = Manifest.read(folder)
    kept = {name: value for name, value in getattr(manifest, part).items() if name not in without}
    _write(folder, replace(manifest, **{part: {**kept, **values}}))


def _write(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).write_text(manifest.to_json())
