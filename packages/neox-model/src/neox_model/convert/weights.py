"""Read and write the weights of a folder in Hugging Face's format, a part of one tensor at a time.

Files are read, not mapped: mapped pages would count as memory of this process. Only `pytorch_model.bin` is
mapped, and for one tensor at a time.
"""

import json
import logging
import struct
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from neox_config.atomic import flush_file
from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_config.pluralize import first_few, pluralize
from neox_config.spec.model import ModelSpec, Vocabulary
from neox_data.amount_progress import tracked
from neox_model.checkpoint.dtypes import DTYPES
from neox_model.checkpoint.shard_file import ShardFile
from neox_model.checkpoint.shards import header_of, raw_bytes
from neox_model.checkpoint.stream import StreamedTensor
from neox_model.convert.errors import ConversionError
from neox_model.convert.families import Family
from neox_model.convert.families.family import Tensors

__all__ = [
    "CHUNK",
    "HEAD",
    "PRECISIONS",
    "UNREADABLE",
    "Stored",
    "TensorReader",
    "WeightFiles",
    "chunks_alike",
    "chunks_of_ours",
    "open_weights",
    "write_weights",
]

logger = logging.getLogger(__name__)

HEAD = "lm_head.weight"
"""Our name of the output projection."""
CHUNK = 2**24
"""Elements that are read at once."""
PRECISIONS: Mapping[torch.dtype, str] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Precision to train in, by the dtype of stored weights; others: "fp32"."""

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED, _PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_FILE_BYTES = 5_000_000_000
UNREADABLE = (
    *(UnpicklingError, RuntimeError, EOFError, LookupError, TypeError, ValueError, AttributeError, OSError),
    *(AssertionError, ArithmeticError, MemoryError, zipfile.BadZipFile, struct.error),
)
"""What torch raises for files that are damaged, or contain something other than what is allowed."""


class TensorReader(ABC):
    """Reads tensors, whole or some rows at a time."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""

    @abstractmethod
    def elements(self, name: str, start: int, stop: int) -> Tensor:
        """Return a copy of some elements of a tensor, in row-major order."""

    def whole(self, name: str) -> Tensor:
        """Return a tensor in its stored dtype."""
        shape = self.shape(name)
        return self.elements(name, 0, prod(shape)).view(shape)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return some rows of a tensor in its stored dtype."""
        row = self.shape(name)[1:]
        return self.elements(name, start * prod(row), stop * prod(row)).view(stop - start, *row)

    def row_chunks(self, name: str, count: int | None = None) -> Iterator[Tensor]:
        """Yield the first `count` rows of a tensor (None: all), some at a time."""
        shape = self.shape(name)
        step = max(1, CHUNK // max(1, prod(shape[1:])))
        total = (shape[0] if shape else 1) if count is None else count
        for start in range(0, total, step):
            yield self.rows(name, start, min(total, start + step))


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored tensor: its file and its name there, shape and dtype."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightFiles(TensorReader):
    """The tensors of a folder.

    Args:
        folder: with `model.safetensors` or `pytorch_model.bin`, or their parts with an index.
        single: name of the one file of the tensors, if it has another.

    Attributes:
        files: the files with tensors.
        tensors: name -> where the tensor is.
        parts: name -> tensor, its first row and the shape, of rows that can be read as a tensor.
        columns: name -> tensor, the first column and the step, of columns that can be read as a tensor.

    Raises:
        ConversionError: there are no weights, or a file is missing or damaged.
    """

    def __init__(self, folder: Path, *, single: str = _SINGLE) -> None:
        self.folder = folder
        self.files, expected = self._find(single)
        self._open: dict[Path, ShardFile] = {}
        self.tensors: dict[str, Stored] = {}
        self.parts: dict[str, tuple[str, int, tuple[int, ...]]] = {}
        self.columns: dict[str, tuple[str, int, int]] = {}
        for file in self.files:
            if file.suffix == ".bin":
                described = {name: (each.dtype, tuple(each.shape)) for name, each in _unpickled(file).items()}
            else:
                self._open[file] = ShardFile(file, file.stat().st_size)
                there = self._open[file].described().items()
                described = {name: (DTYPES[dtype], shape) for name, (dtype, shape) in there}
            for name, (dtype, shape) in described.items():
                if name in self.tensors:
                    raise ConversionError(f"{file} and {self.tensors[name].file} both contain {name}")
                self.tensors[name] = Stored(file, name, shape, dtype)
        missing = [f"{name} in {file}" for name, file in expected.items() if name not in self.tensors]
        if missing:
            raise ConversionError(
                f"{folder}: the index names {first_few(missing, 1)}, which is not there; copy the folder "
                "again"
            )

    def find(self, family: Family, name: str) -> str | None:
        """Return the name under which a tensor of a family's table can be read; None if it is not stored.

        Raises:
            ConversionError: it is part of a tensor whose rows or columns cannot be divided.
        """
        if name in self.parts:
            return name
        whole, parts = family.joined_parts(name)
        stored = family.stored_name(whole, self.tensors)
        if stored is None or len(parts) == 1:
            return stored
        in_turn, shape = family.has_columns_in_turn(whole), self.shape(stored)
        rows, *others = shape
        size, rest = divmod(shape[-1] if in_turn else rows, len(parts))
        if rest:
            what = f"{shape[-1]:,} columns" if in_turn else f"{rows:,} rows"
            raise ConversionError(
                f"{self.folder}: {stored} has {what}, which are not {len(parts)} equal parts; copy the "
                "folder again"
            )
        if in_turn:
            self.columns[name] = stored, parts.index(name), len(parts)
            return name
        self.parts[name] = stored, parts.index(name) * size, (size, *others)
        return name

    def divide(self, family: Family) -> None:
        """Make the parts of tensors that are stored as transformers has them in memory readable.

        Raises:
            ConversionError: the rows of one cannot be divided.
        """
        for stored, tensor in self.tensors.items():
            names = family.in_files(family.usual_name(stored), sum(tensor.shape[:1]))
            if names in ([stored], [family.usual_name(stored)]):
                continue
            size, rest = divmod(prod(tensor.shape[:-1]), max(1, len(names)))
            if rest:
                raise ConversionError(
                    f"{self.folder}: {stored} has the shape {tensor.shape}, whose rows are not {len(names)} "
                    "equal parts; copy the folder again"
                )
            for index, name in enumerate(names):
                self.parts[name] = stored, index * size, (size, *tensor.shape[-1:])

    def whole_name(self, name: str) -> str:
        """Return the name of the tensor that contains a tensor or a part."""
        found = self.parts.get(name) or self.columns.get(name)
        return name if found is None else found[0]

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a tensor or a part."""
        return self.tensors[self.whole_name(name)].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor or a part."""
        if name in self.columns:
            stored, _, step = self.columns[name]
            *others, columns = self.tensors[stored].shape
            return (*others, columns // step)
        return self.parts[name][2] if name in self.parts else self.tensors[name].shape

    def elements(self, name: str, start: int, stop: int) -> Tensor:
        """Return a copy of some elements of a tensor or a part, in row-major order."""
        if name in self.columns:
            stored, first, step = self.columns[name]
            return self.elements(stored, start * step, stop * step)[first::step].clone()
        if name in self.parts:
            name, row, shape = self.parts[name]
            first = row * prod(shape[1:])
            start, stop = first + start, first + stop
        file, stored = self.tensors[name].file, self.tensors[name].name
        if file.suffix == ".bin":
            return _unpickled(file)[stored].reshape(-1)[start:stop].clone()
        return self._open[file].tensor(stored, (start, stop))

    def _find(self, single: str) -> tuple[list[Path], dict[str, str]]:
        """Return the files, and for each name that an index lists the one that should contain it."""
        for whole, index in ((single, _INDEX), (_PICKLED, _PICKLED_INDEX)):
            if (self.folder / whole).is_file():
                return [self.folder / whole], {}
            if (self.folder / index).is_file():
                names = _weight_map(self.folder / index)
                files = [self.folder / file for file in dict.fromkeys(names.values())]
                return [file for file in files if file.is_file()], names
        raise ConversionError(
            f"{self.folder} contains no weights ({_SINGLE}, {_INDEX}, {_PICKLED} or {_PICKLED_INDEX}); pass "
            "the folder of a downloaded model"
        )


def chunks_of_ours(theirs: TensorReader, tensor: Tensors, names: Sequence[str]) -> Iterator[Tensor]:
    """Yield the values of a tensor of ours in row-major order, given theirs.

    Args:
        theirs: reads them.
        tensor: ours; of the vocabulary, the first rows of theirs are read.
        names: of its parts, as they are read.
    """
    if tensor.form.is_same:
        yield from theirs.row_chunks(names[0], tensor.shape[0])
    elif tensor.form.by_entry:
        yield from (tensor.joined((theirs.whole(name),)) for name in names)
    else:
        yield tensor.joined(tuple(theirs.whole(name) for name in names))


def chunks_alike(ours: TensorReader, tensor: Tensors) -> Iterator[Tensor]:
    """Yield the values of a tensor of ours in the chunks of `chunks_of_ours`."""
    if tensor.form.is_same:
        yield from ours.row_chunks(tensor.ours, tensor.shape[0])
    elif tensor.form.by_entry:
        yield from (ours.rows(tensor.ours, entry, entry + 1) for entry in range(tensor.shape[0]))
    else:
        yield ours.whole(tensor.ours)


def open_weights(folder: Path, family: Family, stated: ModelSpec) -> tuple[WeightFiles, ModelSpec]:
    """Return the tensors of a model of transformers, and the model.

    As in transformers (5.0), an embedding and an output projection that are both stored are tied only if they
    are equal, and of tied ones either may be stored. The tensors contain tied ones once, as the embedding.

    Args:
        folder: with the weights.
        family: its class.
        stated: the model of `config.json`.

    Raises:
        ConversionError: there are no weights, or a file is missing or damaged.
    """
    files = WeightFiles(folder)
    files.divide(family)
    if family.packed and any(name.endswith(family.packed) for name in files.tensors):
        raise family.refusal_of_packed(str(folder))
    embedding, head = (
        family.stored_name(family.weight_outside(name), files.tensors) for name in (TOKEN_EMBEDDING, HEAD)
    )
    if not stated.is_tied or head is None:
        return files, stated
    if embedding is not None:
        has_one_shape = files.tensors[embedding].shape == files.tensors[head].shape
        pairs = zip(files.row_chunks(embedding), files.row_chunks(head), strict=True)
        if not has_one_shape or not all(torch.equal(one, other) for one, other in pairs):
            assert isinstance(stated.head, Vocabulary), "no other head is tied"
            return files, replace(stated, head=replace(stated.head, tied=False))
    tensor = files.tensors.pop(head)
    files.tensors.setdefault(embedding or family.weight_outside(TOKEN_EMBEDDING), tensor)
    return files, stated


def _weight_map(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_bytes())["weight_map"]
        if all(isinstance(name, str) and Path(file).name == file != "" for name, file in found.items()):
            return dict(found)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConversionError(f"cannot read {path}: {error}; copy it again") from error
    raise ConversionError(f"{path} names a file outside of its folder; copy it again")


def _unpickled(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a file written by torch.save, mapped into memory; only tensors are unpickled."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if isinstance(found, Mapping) and all(isinstance(each, Tensor) for each in found.values()):
            return found
        raise TypeError("it has no tensors by name")
    except UNREADABLE as error:
        # torch's own text recommends to run the code in the file.
        raise ConversionError(
            f"{path} contains something other than tensors, or is damaged, and was not loaded; save the "
            "weights alone: torch.save(model.state_dict(), FILE), with torch 1.6 or later"
        ) from error


def write_weights(
    folder: Path,
    tensors: Sequence[StreamedTensor],
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
    groups: list[list[StreamedTensor]] = [[]]
    for tensor in tensors:
        size = sum(each.num_bytes for each in groups[-1]) + tensor.num_bytes
        if groups[-1] and single is None and size > file_bytes:
            groups.append([])
        groups[-1].append(tensor)
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    names = names if len(groups) > 1 else [single or _SINGLE]
    logger.info("writing %s", pluralize(len(tensors), "tensor"))
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


def _write_file(
    path: Path, tensors: Sequence[StreamedTensor], values: Iterator[tuple[str, Iterable[Tensor]]]
) -> None:
    header = header_of((tensor.name, tensor.shape, tensor.dtype) for tensor in tensors)
    with path.open("xb") as file:
        file.write(header)
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
