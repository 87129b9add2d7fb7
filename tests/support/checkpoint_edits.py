"""Rewriting a checkpoint of one process, with checksums that fit the changed contents."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from neox_model.checkpoint.contents import MANIFEST, Manifest
from neox_model.checkpoint.shards import Part, write_shard

__all__ = ["edit_manifest", "edit_tensors"]


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
    parts = [
        Part(
            name=key,
            shape=tuple(values.shape),
            block=tuple((0, length) for length in values.shape),
            start=0,
            values=values.reshape(-1),
        )
        for key, values in tensors.items()
    ]
    written, size = write_shard(folder / name, parts)
    records = {piece.name: replace(manifest.tensors[piece.name], pieces=(piece.piece,)) for piece in written}
    _write(folder, replace(manifest, tensors=records, files={name: size}))


def edit_manifest(folder: Path, part: str, values: Mapping[str, Any]) -> None:
    """Change some of the numbers in one part of a checkpoint's manifest.

    Args:
        folder: the checkpoint.
        part: training, engine, schedule or optimizer_scalars.
        values: the new ones.
    """
    manifest = Manifest.read(folder)
    _write(folder, replace(manifest, **{part: {**getattr(manifest, part), **values}}))


def _write(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).write_text(manifest.to_json())
