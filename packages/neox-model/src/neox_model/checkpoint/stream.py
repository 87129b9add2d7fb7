"""Write a checkpoint without ever holding more than a part of a tensor, for conversions.

The contents of the shards follow from names, shapes and dtypes, so their headers are written first, and the
values follow in chunks.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from neox_config.atomic import flush_file
from neox_model.checkpoint.contents import TensorRecord
from neox_model.checkpoint.shards import Part, plan_shard, raw_bytes

__all__ = ["StreamedTensor", "write_streamed_shards"]

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
        records |= _write_shard(path, group, values)
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
) -> dict[str, TensorRecord]:
    plan = plan_shard([_planned(tensor) for tensor in tensors])
    sizes = {tensor.name: tensor.num_bytes for tensor in tensors}
    checksums = []
    with path.open("xb") as file:
        file.write(plan.header)
        chunks: Iterator[memoryview] = iter(())
        rest, of = memoryview(b""), ""
        for part in plan.parts:
            if part.name != of:
                _require_end(rest, chunks, of)
                of, rest = part.name, memoryview(b"")
                chunks = _counted(part.name, sizes[part.name], values)
            checksum, missing = 0, part.num_bytes
            while missing:
                rest = rest or next(chunks)
                piece, rest = rest[:missing], rest[missing:]
                checksum = zlib.crc32(piece, checksum)
                file.write(piece)
                missing -= len(piece)
            checksums.append(checksum)
        _require_end(rest, chunks, of)
        flush_file(file)
    found: dict[str, TensorRecord] = {}
    for written in plan.written(path.name, checksums):
        before = found[written.name].pieces if written.name in found else ()
        found[written.name] = TensorRecord(
            shape=written.shape, dtype=written.dtype, pieces=(*before, written.piece)
        )
    return found


def _planned(tensor: StreamedTensor) -> Part:
    return Part(
        name=tensor.name,
        shape=tensor.shape,
        block=tuple((0, length) for length in tensor.shape),
        start=0,
        values=torch.empty(prod(tensor.shape), dtype=tensor.dtype, device="meta"),
    )


def _counted(name: str, size: int, values: Callable[[str], Iterable[Tensor]]) -> Iterator[memoryview]:
    """Yield the bytes of a tensor; raise an error if they are too few."""
    for chunk in values(name):
        data = raw_bytes(chunk)
        size -= len(data)
        if len(data):
            yield data
    assert size == 0, f"{name} has {-size:,} bytes too many"


def _require_end(rest: memoryview, chunks: Iterator[memoryview], name: str) -> None:
    assert not rest, f"{name} has more values than its shape"
    assert next(chunks, None) is None, f"{name} has more values than its shape"
