"""Write and read shard files in the safetensors format, with a checksum per piece.

Writing directly to the file avoids a second copy of the shard in memory, computes checksums on the way, and
reports a full disk as an `OSError`. `ShardFile` reads the files.

Source: the safetensors format: 8 bytes header length, JSON header, then the tensors' bytes, little-endian.
"""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox_config.atomic import flush_file
from neox_config.counted import counted
from neox_model.checkpoint.blocks import Block, Range, block_numel, find_overlaps
from neox_model.checkpoint.checksums import Checksums
from neox_model.checkpoint.contents import Piece, TensorRecord
from neox_model.checkpoint.dtypes import DTYPE_NAMES
from neox_model.checkpoint.errors import DamagedCheckpointError, quoted
from neox_model.checkpoint.shard_file import ShardFile

__all__ = [
    "Part",
    "ShardPlan",
    "ShardReader",
    "WrittenPiece",
    "plan_shard",
    "raw_bytes",
    "write_durably",
    "write_shard",
]

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
        described = zip(self.parts, checksums, strict=True)
        return [_describe(part, file, crc32) for part, crc32 in described]


def plan_shard(parts: Sequence[Part]) -> ShardPlan:
    """Divide parts into pieces, and return the file that contains them."""
    pieces = tuple(piece for part in parts for piece in _split(part))
    header = _header(pieces)
    return ShardPlan(header=len(header).to_bytes(8, "little") + header, parts=pieces)


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


def _split(part: Part) -> list[Part]:
    if part.values.numel() <= _PIECE_ELEMENTS:
        return [part]
    return [
        Part(name=part.name, shape=part.shape, block=part.block, start=part.start + offset, values=values)
        for offset, values in zip(
            range(0, part.values.numel(), _PIECE_ELEMENTS), part.values.split(_PIECE_ELEMENTS), strict=True
        )
    ]


def _key(part: Part) -> str:
    return part.name if part.fills_block else f"{part.name}:{part.start}-{part.stop}"


def _header(parts: Sequence[Part]) -> bytes:
    """Return the JSON header, padded with spaces so that the data starts at a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for part in parts:
        shape = [stop - start for start, stop in part.block] if part.fills_block else [part.values.numel()]
        entries[_key(part)] = {
            "dtype": DTYPE_NAMES[part.values.dtype],
            "shape": shape,
            "data_offsets": [offset, offset + part.num_bytes],
        }
        offset += part.num_bytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
    return text + b" " * (-len(text) % 8)


def raw_bytes(values: Tensor) -> memoryview:
    """Return the raw little-endian bytes of a flat tensor."""
    flat = values.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _describe(part: Part, file: str, crc32: int) -> WrittenPiece:
    piece = Piece(block=part.block, start=part.start, stop=part.stop, file=file, key=_key(part), crc32=crc32)
    return WrittenPiece(part.name, part.shape, DTYPE_NAMES[part.values.dtype], piece)


class ShardReader:
    """Reads ranges of logical tensors from the shards of one checkpoint folder.

    Args:
        folder: the checkpoint.
        files: shard name to size in bytes, from the manifest.
    """

    def __init__(self, folder: Path, files: Mapping[str, int]) -> None:
        self.folder = folder
        self._sizes = files
        self._open: dict[str, ShardFile] = {}
        # Pieces whose checksum fits, and pieces that `check` has verified.
        self._intact: set[tuple[str, str]] = set()
        self._verified: set[tuple[str, str]] = set()
        # Ranges of one piece often are read one after another.
        self._last: tuple[tuple[str, str], Tensor] | None = None

    def check_sums(self, wanted: Iterable[tuple[TensorRecord, Range]]) -> None:
        """Verify the checksums of all pieces of ranges, in several threads, so that later reads need not.

        Args:
            wanted: tensors, each with a range of it.

        Raises:
            DamagedCheckpointError: a shard is missing, truncated or damaged.
        """
        pieces = {
            (piece.file, piece.key): (piece, record.dtype)
            for record, range_ in wanted
            for piece in record.pieces
            if (piece.file, piece.key) not in self._intact
            and find_overlaps((piece.block, piece.start, piece.stop), range_)
        }
        self.check_pieces(pieces.values())

    def check_pieces(self, pieces: Iterable[tuple[Piece, str]]) -> None:
        """Verify the checksums of pieces, given with safetensors' names of their dtypes, in several threads.

        Raises:
            DamagedCheckpointError: a shard is missing, truncated or damaged.
        """
        pieces = list(pieces)
        with Checksums() as checksums:
            for piece, dtype in pieces:
                checksums.add(raw_bytes(self._values(piece, dtype)))
            for (piece, _), crc32 in zip(pieces, checksums.results(), strict=True):
                self._accept(piece, crc32)

    def check(self, name: str, record: TensorRecord, wanted: Range, dtype: torch.dtype | None = None) -> None:
        """Read and verify the pieces of a range, so that `fill` finds nothing wrong.

        Args:
            name: the tensor's logical name, for messages.
            record: the tensor to read from.
            wanted: the range.
            dtype: the values must be finite in this dtype; None allows any.

        Raises:
            DamagedCheckpointError: a shard is missing, truncated or damaged, a piece is missing, or a value
                is not finite.
        """
        missing = wanted[2] - wanted[1]
        for piece in record.pieces:
            overlaps = find_overlaps((piece.block, piece.start, piece.stop), wanted)
            missing -= sum(overlap.numel for overlap in overlaps)
            if overlaps and (piece.file, piece.key) not in self._verified:
                if dtype is None and (piece.file, piece.key) in self._intact:
                    continue
                values = self.read(piece, record.dtype)
                if dtype is not None and not bool(values.to(dtype).isfinite().all()):
                    raise DamagedCheckpointError(
                        f"{self.folder / piece.file}: {quoted(name)} contains values that are not finite"
                    )
                self._verified.add((piece.file, piece.key))
        self._refuse_missing(missing, name)

    def fill(self, target: Tensor, name: str, record: TensorRecord, wanted: Range) -> None:
        """Fill a flat tensor with a range of a logical tensor, converting the dtype.

        Args:
            target: one dimension, any dtype and device; written in place.
            name: the tensor's logical name, for messages.
            record: the tensor to read from.
            wanted: the range, with as many elements as `target`.

        Raises:
            DamagedCheckpointError: a shard is missing, truncated or damaged, or a piece is missing.
        """
        missing = target.numel()
        for piece in record.pieces:
            overlaps = find_overlaps((piece.block, piece.start, piece.stop), wanted)
            if overlaps:
                values = self.read(piece, record.dtype)
                for overlap in overlaps:
                    overlap.copy(values, target)
                    missing -= overlap.numel
        self._refuse_missing(missing, name)

    def _refuse_missing(self, missing: int, name: str) -> None:
        if missing:
            elements = counted(missing, f"element of {quoted(name)} is", f"elements of {quoted(name)} are")
            raise DamagedCheckpointError(f"{elements} missing in {self.folder}")

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
        values = self._shard(path).tensor(piece.key)
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
                f"{self.folder / piece.file} is damaged: the checksum of {quoted(piece.key)} does not match"
            )
        self._intact.add((piece.file, piece.key))

    def _shard(self, path: Path) -> ShardFile:
        if path.name not in self._open:
            self._open[path.name] = ShardFile(path, self._sizes[path.name])
        return self._open[path.name]
