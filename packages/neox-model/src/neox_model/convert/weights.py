"""Read and write the weights of a folder in Hugging Face's format, a part of one tensor at a time.

Files are read, not mapped: mapped pages would count as memory of this process. Only `pytorch_model.bin` is
mapped, and for one tensor at a time.
"""

import json
import logging
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from neox_config.atomic import flush_file
from neox_config.counted import counted
from neox_data.amount_progress import tracked
from neox_model.checkpoint.dtypes import DTYPE_NAMES, DTYPES
from neox_model.checkpoint.shard_file import ShardFile
from neox_model.checkpoint.shards import raw_bytes
from neox_model.convert.errors import ConversionError

__all__ = ["CHUNK", "PRECISIONS", "UNREADABLE", "Stored", "WeightFiles", "Written", "write_weights"]

logger = logging.getLogger(__name__)

CHUNK = 2**24
"""Elements that are read at once."""
PRECISIONS: Mapping[torch.dtype, str] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Precision to train in, by the dtype of stored weights; others: "fp32"."""

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED, _PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_FILE_BYTES = 5_000_000_000
# What torch names in its error about an object that it does not unpickle.
_CLASS = re.compile(r"GLOBAL ([\w.]+)")
UNREADABLE = (
    *(UnpicklingError, RuntimeError, EOFError, LookupError, TypeError, ValueError, AttributeError, OSError),
    *(AssertionError, ArithmeticError, MemoryError, zipfile.BadZipFile, struct.error),
)
"""What torch raises for files that are damaged, or contain something other than what is allowed."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored tensor: its file and its name there, shape and dtype."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightFiles:
    """The tensors of a folder.

    Args:
        folder: with `model.safetensors` or `pytorch_model.bin`, or their parts with an index.
        single: name of the one file of the tensors, if it has another.

    Attributes:
        files: the files with tensors.
        tensors: name -> where the tensor is.

    Raises:
        ConversionError: there are no weights, or a file is missing or damaged.
    """

    def __init__(self, folder: Path, *, single: str = _SINGLE) -> None:
        self.folder = folder
        self.files, expected = self._find(single)
        self._open = {file: _opened(file) for file in self.files if file.suffix != ".bin"}
        self.tensors: dict[str, Stored] = {}
        for file in self.files:
            for name, stored in self._contents(file):
                if name in self.tensors:
                    raise ConversionError(f"{file} and {self.tensors[name].file} both contain {name}")
                self.tensors[name] = stored
        missing = sorted(expected - self.tensors.keys())
        if missing:
            raise ConversionError(
                f"{folder}: the index names {missing[0]} (and {len(missing) - 1:,} more), which its files do "
                "not contain; copy the folder again"
            )

    def whole(self, name: str) -> Tensor:
        """Return a copy of a tensor."""
        stored = self.tensors[name]
        return self._elements(name, 0, prod(stored.shape)).view(stored.shape)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return a copy of some rows of a tensor."""
        row = self.tensors[name].shape[1:]
        return self._elements(name, start * prod(row), stop * prod(row)).view(stop - start, *row)

    def _elements(self, name: str, start: int, stop: int) -> Tensor:
        file, stored = self.tensors[name].file, self.tensors[name].name
        if file.suffix == ".bin":
            return _unpickled(file)[stored].reshape(-1)[start:stop].clone()
        return self._open[file].tensor(stored, (start, stop))

    def row_chunks(self, name: str, count: int | None = None) -> Iterator[Tensor]:
        """Yield the first `count` rows of a tensor (None: all), some at a time."""
        shape = self.tensors[name].shape
        step = max(1, CHUNK // max(1, prod(shape[1:])))
        total = (shape[0] if shape else 1) if count is None else count
        for start in range(0, total, step):
            yield self.rows(name, start, min(total, start + step))

    def _contents(self, file: Path) -> Iterator[tuple[str, Stored]]:
        """Yield the tensors of a file."""
        if file.suffix == ".bin":
            for name, tensor in _unpickled(file).items():
                yield name, Stored(file, name, tuple(tensor.shape), tensor.dtype)
            return
        for name, (dtype, shape) in self._open[file].described().items():
            yield name, Stored(file, name, shape, DTYPES[dtype])

    def _find(self, single: str) -> tuple[list[Path], set[str]]:
        """Return the files, and the names that an index lists."""
        for whole, index in ((single, _INDEX), (_PICKLED, _PICKLED_INDEX)):
            if (self.folder / whole).is_file():
                return [self.folder / whole], set()
            if (self.folder / index).is_file():
                names = _weight_map(self.folder / index)
                return [self.folder / file for file in dict.fromkeys(names.values())], set(names)
        raise ConversionError(
            f"{self.folder} contains no weights ({_SINGLE}, {_INDEX}, {_PICKLED} or {_PICKLED_INDEX}); pass "
            "the folder of a downloaded model"
        )


def _weight_map(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_bytes())["weight_map"]
        if all(isinstance(name, str) and Path(file).name == file != "" for name, file in found.items()):
            return dict(found)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConversionError(f"cannot read {path}: {error}; copy it again") from error
    raise ConversionError(f"{path} names a file outside of its folder; copy it again")


def _opened(path: Path) -> ShardFile:
    try:
        return ShardFile(path, path.stat().st_size)
    except OSError as error:
        raise ConversionError(f"cannot read {path}: {error.strerror}; copy it again") from error


def _unpickled(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a file written by torch.save, mapped into memory; only tensors are unpickled."""
    if not zipfile.is_zipfile(path):
        raise ConversionError(
            f"{path} is missing, in torch's format of before version 1.6, or damaged; load it with "
            "transformers and save it as safetensors"
        )
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UNREADABLE as error:
        raise ConversionError(
            f"{path} contains something other than tensors, or is damaged, and was not loaded: "
            f"{_why_refused(error)}; save the weights alone: torch.save(model.state_dict(), FILE)"
        ) from error
    if _has_tensors(found):
        return found
    parts = found.items() if isinstance(found, Mapping) else ()
    inside = [key for key, each in parts if _has_tensors(each) and each]
    if inside:
        raise ConversionError(
            f"{path} does not contain tensors by name, but has them under {inside[0]!r}; save these alone: "
            f"torch.save(torch.load(FILE)[{inside[0]!r}], FILE)"
        )
    raise ConversionError(
        f"{path} does not contain tensors by name; save the weights: torch.save(model.state_dict(), FILE)"
    )


def _why_refused(error: BaseException) -> str:
    """Return why torch did not load a file; its own text recommends to run the code in the file."""
    named = _CLASS.search(str(error))
    if named is not None:
        return f"it has objects of the class {named[1]}, and nothing but tensors is unpickled"
    if isinstance(error, UnpicklingError):
        return "it has other objects of Python, and nothing but tensors is unpickled"
    return (str(error).splitlines() or [type(error).__name__])[0]


def _has_tensors(found: Any) -> bool:
    return isinstance(found, Mapping) and all(isinstance(each, Tensor) for each in found.values())


@dataclass(frozen=True, slots=True)
class Written:
    """A tensor to write: name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return the size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def write_weights(
    folder: Path,
    tensors: Sequence[Written],
    values: Iterable[tuple[str, Iterable[Tensor]]],
    *,
    file_bytes: int = _FILE_BYTES,
    single: str | None = None,
) -> list[Path]:
    """Write tensors as `model.safetensors`, or as several files with an index.

    Args:
        folder: an existing folder.
        tensors: what is written, in this order.
        values: the same names in the same order, each with its values in row-major order, in chunks.
        file_bytes: size after which a new file begins; a tensor is never divided.
        single: write one file of this name, whatever its size.

    Returns:
        The files.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    groups = [[*tensors]] if single is not None else _groups(tensors, file_bytes)
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    names = names if len(groups) > 1 else [single or _SINGLE]
    logger.info("writing %s", counted(len(tensors), "tensor"))
    with tracked(values, len(tensors), "tensors written") as stream:
        for name, group in zip(names, groups, strict=True):
            _write_file(folder / name, group, stream)
        assert next(stream, None) is None, "more tensors than announced"
    if len(groups) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)},
            "weight_map": {
                tensor.name: name for name, group in zip(names, groups, strict=True) for tensor in group
            },
        }
        (folder / _INDEX).write_text(json.dumps(index, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return [folder / name for name in names]


def _groups(tensors: Sequence[Written], file_bytes: int) -> list[list[Written]]:
    groups: list[list[Written]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(each.num_bytes for each in groups[-1]) + tensor.num_bytes > file_bytes:
            groups.append([])
        groups[-1].append(tensor)
    return groups


def _write_file(
    path: Path, tensors: Sequence[Written], values: Iterator[tuple[str, Iterable[Tensor]]]
) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes
    header = json.dumps(entries, separators=(",", ":"), allow_nan=False).encode()
    header += b" " * (-len(header) % 8)
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors:
            name, chunks = next(values)
            assert name == tensor.name, f"{name} instead of {tensor.name}"
            missing = tensor.num_bytes
            for chunk in chunks:
                assert chunk.dtype == tensor.dtype, f"{name} is {chunk.dtype}"
                data = raw_bytes(chunk)
                file.write(data)
                missing -= len(data)
            assert missing == 0, f"{name} lacks {missing:,} bytes"
        flush_file(file)
