"""Write and read shard files in the safetensors format, with a checksum per piece.

Writing directly to the file avoids a second copy of the shard in memory, computes checksums on the way, and
reports a full disk as an `OSError`. `ShardFile` reads the files.

Source: the safetensors format: 8 bytes header length, JSON header, then the tensors' bytes, little-endian.
"""

import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox_config.atomic import flush_file
from neox_config.pluralize import pluralize
from neox_model.checkpoint.blocks import Block, Overlap, Range, block_numel, find_overlaps, whole_block
from neox_model.checkpoint.checksums import Checksums
from neox_model.checkpoint.contents import Manifest, Piece, TensorRecord
from neox_model.checkpoint.dtypes import DTYPE_NAMES, DTYPES
from neox_model.checkpoint.errors import DamagedCheckpointError, quoted
from neox_model.checkpoint.shard_file import ShardFile

__all__ = [
    "Part",
    "ShardPlan",
    "ShardReader",
    "Wanted",
    "WrittenPiece",
    "plan_shard",
    "raw_bytes",
    "records_of",
    "write_durably",
    "write_shard",
]

# Logical name, range, and the dtype in which its values must be finite; None: they need not be.
Wanted = tuple[str, Range, torch.dtype | None]

# A piece is read whole to verify it; 64 MiB of float32 limits what another layout reads needlessly.
_PIECE_ELEMENTS = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's part of a tensor to write: flat values of a range of a block.

    Args:
        name: logical name of the tensor.
        shape: shape of the whole tensor.
        block: this rank's block of it.
        start: first element of the range, row-major inside the block.
        values: the elements, 1-D, on any device.
    """

    name: str
    shape: tuple[int, ...]
    block: Block
    start: int
    values: Tensor

    @property
    def num_bytes(self) -> int:
        """Return the size of the values in bytes."""
        return self.values.numel() * self.values.element_size()

    @property
    def stop(self) -> int:
        """Return the end of the range."""
        return self.start + self.values.numel()

    @property
    def fills_block(self) -> bool:
        """Return True if the range is the whole block."""
        return self.values.numel() == block_numel(self.block)

    @property
    def key(self) -> str:
        """Return the name of the values in a file."""
        return self.name if self.fills_block else f"{self.name}:{self.start}-{self.stop}"


@dataclass(frozen=True, slots=True)
class WrittenPiece:
    """A piece on disk, with the name, shape and dtype of its tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    piece: Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """The contents of a shard file before it is written: a header, then the bytes of the parts.

    Args:
        header: everything before the first part.
        parts: the parts in the order of the file, none larger than a piece.
    """

    header: bytes
    parts: tuple[Part, ...]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Return the first byte of each part in the file, and the one after its last."""
        stops = list(accumulate((part.num_bytes for part in self.parts), initial=len(self.header)))
        return list(pairwise(stops))

    @property
    def size(self) -> int:
        """Return the size of the file in bytes."""
        return len(self.header) + sum(part.num_bytes for part in self.parts)

    def written(self, file: str, checksums: Sequence[int]) -> list[WrittenPiece]:
        """Describe the pieces of the written file, whose checksums are given in its order."""
        return [
            WrittenPiece(
                name=part.name,
                shape=part.shape,
                dtype=DTYPE_NAMES[part.values.dtype],
                piece=Piece(
                    block=part.block, start=part.start, stop=part.stop, file=file, key=part.key, crc32=crc32
                ),
            )
            for part, crc32 in zip(self.parts, checksums, strict=True)
        ]


def plan_shard(parts: Sequence[Part]) -> ShardPlan:
    """Divide parts into pieces, and return the file that contains them."""
    pieces = tuple(
        replace(part, start=part.start + offset, values=part.values[offset : offset + _PIECE_ELEMENTS])
        for part in parts
        for offset in range(0, max(part.values.numel(), 1), _PIECE_ELEMENTS)
    )
    shapes = (
        [stop - start for start, stop in piece.block] if piece.fills_block else [piece.values.numel()]
        for piece in pieces
    )
    described = zip(pieces, shapes, strict=True)
    header = header_of((piece.key, shape, piece.values.dtype) for piece, shape in described)
    return ShardPlan(header=header, parts=pieces)


def header_of(tensors: Iterable[tuple[str, Sequence[int], torch.dtype]]) -> bytes:
    """Return what precedes the bytes of tensors in a safetensors file, given names, shapes and dtypes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, dtype in tensors:
        start, offset = offset, offset + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, offset]}
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
    # The data starts at a multiple of 8 bytes.
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def write_shard(path: Path, parts: Sequence[Part]) -> tuple[list[WrittenPiece], int]:
    """Write parts into a new safetensors file and flush it to disk.

    Returns:
        The written pieces, and the file's size in bytes.

    Raises:
        OSError: the disk is full or the file cannot be written.
    """
    plan = plan_shard(parts)
    with Checksums() as checksums, path.open("xb") as file:
        file.write(plan.header)
        for part in plan.parts:
            data = raw_bytes(part.values)
            checksums.add(data)
            file.write(data)
        flush_file(file)
        return plan.written(path.name, checksums.results()), plan.size


def write_durably(path: Path, text: str) -> None:
    """Write a new text file and flush it to disk."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        flush_file(file)


def raw_bytes(values: Tensor) -> memoryview:
    """Return the raw little-endian bytes of a flat tensor."""
    flat = values.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def records_of(pieces: Iterable[WrittenPiece]) -> dict[str, TensorRecord]:
    """Return the records of the tensors that have these pieces."""
    found: dict[str, list[WrittenPiece]] = defaultdict(list)
    for written in pieces:
        found[written.name].append(written)
    return {
        name: TensorRecord(
            shape=parts[0].shape, dtype=parts[0].dtype, pieces=tuple(part.piece for part in parts)
        )
        for name, parts in found.items()
    }


class ShardReader:
    """Reads ranges of logical tensors from the shards of one checkpoint folder.

    Args:
        folder: the checkpoint.
        manifest: its manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._manifest = manifest
        self._open: dict[str, ShardFile] = {}
        # Pieces whose checksum fits.
        self._intact: set[tuple[str, str]] = set()
        # Ranges of one piece often are read one after another.
        self._last: tuple[tuple[str, str], Tensor] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._manifest.tensors

    def check(self, wanted: Iterable[Wanted]) -> None:
        """Verify all pieces of ranges, so that `fill` finds nothing wrong; checksums in several threads.

        Raises:
            DamagedCheckpointError: a shard is missing, truncated or damaged, a piece is missing, or a value
                is not finite.
        """
        found = [
            (name, piece, self._manifest.tensors[name].dtype, dtype)
            for name, range_, dtype in wanted
            for piece, _ in self._overlapping(name, range_)
        ]
        self.check_pieces((piece, stored) for _, piece, stored, _ in found)
        for name, piece, stored, dtype in found:
            if dtype is not None and not bool(self.read(piece, stored).to(dtype).isfinite().all()):
                raise DamagedCheckpointError(
                    f"{self.folder / piece.file}: {quoted(name)} contains values that are not finite"
                )

    def check_pieces(self, pieces: Iterable[tuple[Piece, str]]) -> None:
        """Verify the checksums of pieces, given with safetensors' names of their dtypes, in several threads.

        Raises:
            DamagedCheckpointError: a shard is missing, truncated or damaged.
        """
        unknown = {
            (piece.file, piece.key): (piece, dtype)
            for piece, dtype in pieces
            if (piece.file, piece.key) not in self._intact
        }
        with Checksums() as checksums:
            for piece, dtype in unknown.values():
                checksums.add(raw_bytes(self._values(piece, dtype)))
            for (piece, _), crc32 in zip(unknown.values(), checksums.results(), strict=True):
                self._accept(piece, crc32)

    def fill(self, target: Tensor, name: str, wanted: Range) -> None:
        """Fill a flat tensor with a range of a logical tensor, converting the dtype.

        Args:
            target: one dimension, any dtype and device; written in place.
            name: the tensor's logical name.
            wanted: the range, with as many elements as `target`.

        Raises:
            DamagedCheckpointError: a shard is missing, truncated or damaged, or a piece is missing.
        """
        for piece, overlaps in self._overlapping(name, wanted):
            values = self.read(piece, self._manifest.tensors[name].dtype)
            for overlap in overlaps:
                overlap.copy(values, target)

    def _overlapping(self, name: str, wanted: Range) -> Iterator[tuple[Piece, list[Overlap]]]:
        """Yield the pieces with elements of a range; at the end, raise an error if some are in no piece."""
        missing = wanted[2] - wanted[1]
        for piece in self._manifest.tensors[name].pieces:
            overlaps = find_overlaps(piece.range, wanted)
            if overlaps:
                missing -= sum(overlap.numel for overlap in overlaps)
                yield piece, overlaps
        if missing:
            elements = pluralize(missing, f"element of {quoted(name)} is", f"elements of {quoted(name)} are")
            raise DamagedCheckpointError(f"{elements} missing in {self.folder}", code="missing-elements")

    def values(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read elements of a whole tensor in row-major order; return them flat, in the stored dtype.

        Args:
            name: the tensor's logical name.
            start: the first element.
            stop: the one after the last; None: all that follow.

        Raises:
            DamagedCheckpointError: as `fill`.
        """
        record = self._manifest.tensors[name]
        stop = prod(record.shape) if stop is None else stop
        values = torch.empty(stop - start, dtype=DTYPES[record.dtype])
        self.fill(values, name, (whole_block(record.shape), start, stop))
        return values

    def read(self, piece: Piece, dtype: str) -> Tensor:
        """Read and verify the flat values of one piece.

        Args:
            piece: a piece of a tensor of this checkpoint.
            dtype: safetensors' name of the tensor's dtype.

        Raises:
            DamagedCheckpointError: its shard is missing, truncated or damaged.
        """
        place = piece.file, piece.key
        if self._last is None or self._last[0] != place:
            values = self._values(piece, dtype)
            if place not in self._intact:
                self._accept(piece, zlib.crc32(raw_bytes(values)))
            self._last = place, values
        return self._last[1]

    def _values(self, piece: Piece, dtype: str) -> Tensor:
        """Return the flat values of one piece, without verifying their checksum."""
        path = self.folder / piece.file
        if piece.file not in self._open:
            self._open[piece.file] = ShardFile(path, self._manifest.files[piece.file])
        values = self._open[piece.file].tensor(piece.key)
        if DTYPE_NAMES.get(values.dtype) != dtype or values.numel() != piece.numel:
            raise DamagedCheckpointError(
                f"{path} is damaged: {quoted(piece.key)} has {values.numel():,} elements of {values.dtype}, "
                f"but the manifest records {piece.numel:,} of {dtype}"
            )
        return values

    def _accept(self, piece: Piece, crc32: int) -> None:
        """Remember that a piece is intact, if it has this checksum."""
        if crc32 != piece.crc32:
            raise DamagedCheckpointError(
                f"{self.folder / piece.file} is damaged: the checksum of {quoted(piece.key)} does not match",
                code="other-checksum",
            )
        self._intact.add((piece.file, piece.key))
