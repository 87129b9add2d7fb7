"""Write a checkpoint without ever holding more than a part of a tensor, for conversions.

The contents of the shards follow from names, shapes and dtypes, so their headers are written first, and the
values follow in chunks.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from neox_config.atomic import flush_file
from neox_config.facts.checkpoints import MANIFEST, checkpoint_name
from neox_model.checkpoint import directory as folders
from neox_model.checkpoint.blocks import whole_block
from neox_model.checkpoint.contents import Manifest, TensorRecord
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.shards import (
    Part,
    WrittenPiece,
    plan_shard,
    raw_bytes,
    records_of,
    write_durably,
)

__all__ = ["StreamedTensor", "write_streamed_shards", "write_whole_tensors"]

# A shard ends with the tensor that reaches this size.
_SHARD_BYTES = 2**32


@dataclass(frozen=True, slots=True)
class StreamedTensor:
    """A tensor to write: logical name, whole shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return the size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def write_streamed_shards(
    folder: Path, tensors: Sequence[StreamedTensor], values: Callable[[str], Iterable[Tensor]]
) -> tuple[dict[str, TensorRecord], dict[str, int]]:
    """Write tensors into new shards and flush them to disk.

    Args:
        folder: the checkpoint's folder, which exists.
        tensors: what is written, in this order.
        values: name -> the tensor's values in row-major order, in chunks of any shape, of its dtype.

    Returns:
        The records of the tensors and the sizes of the files, for the manifest.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    records: dict[str, TensorRecord] = {}
    files: dict[str, int] = {}
    for number, group in enumerate(_groups(tensors)):
        path = folder / f"shard-{number:05d}.safetensors"
        records |= records_of(_write_shard(path, group, values))
        files[path.name] = path.stat().st_size
    return records, files


def _groups(tensors: Sequence[StreamedTensor]) -> Iterator[list[StreamedTensor]]:
    group: list[StreamedTensor] = []
    for tensor in tensors:
        group.append(tensor)
        if sum(each.num_bytes for each in group) >= _SHARD_BYTES:
            yield group
            group = []
    if group:
        yield group


def _write_shard(
    path: Path, tensors: Sequence[StreamedTensor], values: Callable[[str], Iterable[Tensor]]
) -> list[WrittenPiece]:
    plan = plan_shard(
        [
            Part(
                name=tensor.name,
                shape=tensor.shape,
                block=whole_block(tensor.shape),
                start=0,
                values=torch.empty(prod(tensor.shape), dtype=tensor.dtype, device="meta"),
            )
            for tensor in tensors
        ]
    )
    checksums = []
    with path.open("xb") as file:
        file.write(plan.header)
        for name, parts in groupby(plan.parts, key=lambda part: part.name):
            chunks = filter(len, map(raw_bytes, values(name)))
            rest = memoryview(b"")
            for part in parts:
                checksum, missing = 0, part.num_bytes
                while missing:
                    rest = rest or next(chunks, rest)
                    assert rest, f"{name} has fewer values than its shape"
                    piece, rest = rest[:missing], rest[missing:]
                    checksum = zlib.crc32(piece, checksum)
                    file.write(piece)
                    missing -= len(piece)
                checksums.append(checksum)
            rest = rest or next(chunks, rest)
            assert not rest, f"{name} has more values than its shape"
        flush_file(file)
    return plan.written(path.name, checksums)


def write_whole_tensors(
    manifest: Manifest,
    tensors: Sequence[StreamedTensor],
    values: Callable[[str], Iterable[Tensor]],
    output: Path,
) -> tuple[Path, Manifest]:
    """Write a checkpoint of whole tensors, to which `latest` points then.

    Args:
        manifest: its manifest, with other tensors and files.
        tensors: as for `write_streamed_shards`.
        values: as for `write_streamed_shards`.
        output: folder of checkpoints to write to.

    Returns:
        The folder of the new checkpoint, and its manifest.

    Raises:
        CheckpointError: the output has a checkpoint of this iteration.
        OSError: the output cannot be written.
    """
    final = output / checkpoint_name(manifest.iteration)
    if final.exists():
        raise CheckpointError(f"{final} exists already; choose another folder")
    temporary = folders.unfinished(final)
    folders.begin(temporary)
    try:
        records, files = write_streamed_shards(temporary, tensors, values)
        written = replace(manifest, tensors=records, files=files)
        write_durably(temporary / MANIFEST, written.to_json())
        folders.publish(temporary, final)
    except BaseException:
        folders.abandon(temporary)
        raise
    return final, written
