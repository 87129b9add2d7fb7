"""Read tensors from one safetensors file by system calls.

The safetensors library maps files into memory: if a mapped file is truncated, the kernel ends the process
that reads it with SIGBUS. A read that ends early is an error here, which names the file.

Source: the safetensors format: 8 bytes header length, JSON header, then the tensors' bytes, little-endian.
"""

import json
import os
from math import prod
from operator import index
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from neox_config.limits import limit_reached
from neox_model.checkpoint.dtypes import DTYPES
from neox_model.checkpoint.errors import CheckpointError, DamagedCheckpointError, quoted
from neox_model.checkpoint.stored_types import STORED_TYPES

__all__ = ["LENGTH_BYTES", "ShardFile", "header_stop"]

LENGTH_BYTES = 8
"""Bytes of the length of the header, with which a file begins."""

# Limit of the format.
_LONGEST_HEADER = 100_000_000
_METADATA = "__metadata__"
# The kernel reads at most 2 GiB at once.
_MOST_BYTES = 2**30


class ShardFile:
    """An open safetensors file, closed with this object.

    Args:
        path: the file.
        size: its size in bytes, as the manifest records it.

    Raises:
        DamagedCheckpointError: it is missing, has another size, or its header is damaged.
        CheckpointError: too many files are open.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            finalize(self, os.close, self._file)
            found = os.fstat(self._file).st_size
        except OSError as error:
            limit = limit_reached(error)
            if limit is not None:
                raise CheckpointError(f"cannot open {path}: {limit}", code="too-many-files") from error
            raise DamagedCheckpointError(f"cannot read {path}: {error.strerror}") from error
        if found != size:
            raise self._of_another_size(found)
        self._entries, self._start = self._header()

    def tensor(self, key: str, elements: tuple[int, int] | None = None) -> Tensor:
        """Read one tensor; return its values, flat.

        Args:
            key: its name.
            elements: the first element to read, and the one after the last; None: all.

        Raises:
            DamagedCheckpointError: it is not in the file, or the file is truncated or cannot be read.
        """
        dtype, shape, offset = self._entry(key)
        start, stop = (0, prod(shape)) if elements is None else elements
        values = torch.empty(stop - start, dtype=DTYPES[dtype])
        target = memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]
        self._read(target, self._start + offset + start * STORED_TYPES[dtype].itemsize)
        return values

    def span(self, key: str) -> tuple[int, int]:
        """Return the first byte of a tensor in the file, and the one after its last.

        Raises:
            DamagedCheckpointError: it is not in the file, or the header is wrong.
        """
        dtype, shape, offset = self._entry(key)
        first = self._start + offset
        return first, first + prod(shape) * STORED_TYPES[dtype].itemsize

    def described(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the dtype, by safetensors' name, and the shape of each tensor by name.

        Raises:
            DamagedCheckpointError: the header is wrong, or a dtype is not one of `STORED_TYPES`.
        """
        return {key: self._entry(key)[:2] for key in self._entries}

    def _entry(self, key: str) -> tuple[str, tuple[int, ...], int]:
        """Return the dtype, the shape and the first byte of a tensor in the data."""
        if key not in self._entries:
            raise self._damaged(f"it does not contain {quoted(key)}")
        try:
            dtype, shape, (first, stop) = (
                self._entries[key][name] for name in ("dtype", "shape", "data_offsets")
            )
            if isinstance(dtype, str) and dtype not in STORED_TYPES:
                what = f"whose data type {quoted(dtype)} is none of {', '.join(STORED_TYPES)}"
                raise self._damaged(f"its header is wrong for {quoted(key)}, {what}")
            numel, itemsize = prod(shape), STORED_TYPES[dtype].itemsize
            is_inside = 0 <= first <= stop <= self._size - self._start and numel >= 0
            are_integers = all(isinstance(number, int) for number in (first, stop, numel))
            if not is_inside or not are_integers or stop - first != numel * itemsize:
                raise ValueError("wrong size")
            return dtype, tuple(map(index, shape)), first
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"its header is wrong for {quoted(key)}") from error

    def _header(self) -> tuple[dict[str, Any], int]:
        """Return the entries of the header by key, and the first byte of the data."""
        length = bytearray(min(LENGTH_BYTES, self._size))
        self._read(memoryview(length), 0)
        size = int.from_bytes(length, "little")
        if len(length) < LENGTH_BYTES or size > min(self._size - LENGTH_BYTES, _LONGEST_HEADER):
            raise self._damaged("its header has a wrong length")
        text = bytearray(size)
        self._read(memoryview(text), LENGTH_BYTES)
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"its header is not JSON ({quoted(str(error))})") from error
        if not isinstance(entries, dict):
            raise self._damaged("its header is not a JSON object")
        entries.pop(_METADATA, None)
        return entries, LENGTH_BYTES + size

    def _read(self, target: memoryview, offset: int) -> None:
        """Fill memory with the bytes of the file from an offset."""
        done = 0
        try:
            while done < len(target):
                count = os.preadv(self._file, [target[done : done + _MOST_BYTES]], offset + done)
                if count == 0:
                    raise self._of_another_size(os.fstat(self._file).st_size)
                done += count
        except OSError as error:
            raise DamagedCheckpointError(f"cannot read {self._path}: {error.strerror}") from error

    def _of_another_size(self, size: int) -> DamagedCheckpointError:
        return self._damaged(f"it has {size:,} bytes instead of {self._size:,}")

    def _damaged(self, what: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self._path} is damaged: {what}")


def header_stop(path: Path) -> int:
    """Return the first byte after the header of a file of which only its length may be there."""
    with path.open("rb") as file:
        return LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")
