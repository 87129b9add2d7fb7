"""The files of a checkpoint of GPT-NeoX, whichever of its layouts they have.

| written with | weights | keys |
| --- | --- | --- |
| `pipe_parallel_size` of 1 or more, versions 1.0 and 2.0 | `layer_NN-model_MM-model_states.pt` | of a layer |
| `pipe_parallel_size: 0` | `mp_rank_MM_model_states.pt`, in `module` | `sequential.N.` and of a layer |

MM is the tensor-parallel rank, NN the layer: 0 is the embedding, 2 the first block. With L blocks, L + 3 is
the final norm, and L + 4 the output projection, if it is not tied to the embedding.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox_model.convert.errors import ConversionError
from neox_model.convert.neox.folder import LAYER_FILE, RANK_FILE
from neox_model.convert.neox.records import read_record
from neox_model.convert.weights import CHUNK

__all__ = ["FIRST_BLOCK", "Key", "NeoXFiles"]

FIRST_BLOCK = 2
"""Number of the first block's layer; 0 is the embedding, and 1 has no weights."""

_SEQUENTIAL = re.compile(r"sequential\.(\d+)\.(.+)")
_COMPLETE = "copy the checkpoint again, with all its files"
# Entries that all ranks record alike, and that are used.
_COMPARED = ("iteration", "args")


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """A tensor of all ranks: the number of its layer, and its name in it."""

    layer: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} of layer {self.layer:02d}"


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of one rank: its file and place, shape and dtype."""

    path: Path
    place: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


class NeoXFiles:
    """The tensors and the recorded state of a checkpoint.

    Args:
        folder: with `layer_*` and `mp_rank_*` files.
        average_copies: average what all ranks store of one tensor of the model if it differs, instead of
            refusing it.

    Attributes:
        folder: likewise.
        average_copies: likewise.
        differences: tensor that was averaged -> largest difference between two ranks' values of an element.
        state: what the file of rank 0 records, without weights.
        ranks: number of tensor-parallel ranks.
        parts: key -> the tensor of each rank.
        read: the files; others in the folder, such as optimizer states, are not read.
    """

    def __init__(self, folder: Path, *, average_copies: bool = False) -> None:
        self.folder, self.average_copies = folder, average_copies
        self.differences: dict[Key, float] = {}
        states = {rank: path for (rank,), path in _numbered(folder, RANK_FILE).items()}
        layers = _numbered(folder, LAYER_FILE)
        missing = next(number for number in range(len(states) + 1) if number not in states)
        if missing <= max(states, default=0):
            raise ConversionError(f"{folder} contains no mp_rank_{missing:02d}_model_states.pt; {_COMPLETE}")
        self.state = _same_state(states)
        self.ranks = 1 + max(rank for _, rank in layers) if layers else len(states)
        found = _of_layers(layers) if layers else _of_ranks(states)
        self.parts: dict[Key, tuple[_Part, ...]] = {}
        for key, by_rank in found.items():
            for rank in range(self.ranks):
                if rank not in by_rank:
                    raise ConversionError(
                        f"{folder}: {key} is missing on rank {rank} of {self.ranks}; {_COMPLETE}"
                    )
            if len({part.dtype for part in by_rank.values()}) > 1:
                raise ConversionError(f"{folder}: {key} has different dtypes on the ranks; {_COMPLETE}")
            self.parts[key] = tuple(by_rank[rank] for rank in range(self.ranks))
        self.read = sorted({*states.values(), *layers.values()})

    def shapes(self, key: Key) -> list[tuple[int, ...]]:
        """Return the shape on each rank."""
        return [part.shape for part in self.parts[key]]

    def dtype(self, key: Key) -> torch.dtype:
        """Return the dtype, which is the same on all ranks."""
        return self.parts[key][0].dtype

    def whole(self, key: Key, rank: int) -> Tensor:
        """Return a copy of the tensor of a rank."""
        shape = self.parts[key][rank].shape
        return self._elements(key, rank, 0, prod(shape)).view(shape)

    def common(self, key: Key) -> Tensor:
        """Return a tensor that all ranks store and the model has once, such as a norm's weight.

        Each rank updates its own copy; where a sum over ranks is not the same to the last bit on all of them,
        the copies drift apart. Those of the published GPT-NeoX-20B differ.

        Returns:
            The equal copies, or their mean rounded to their dtype.
        """
        copies = torch.stack([self.whole(key, rank) for rank in range(self.ranks)])
        if bool((copies == copies[0]).all()):
            return copies[0]
        exact = copies.double()
        difference = float((exact.amax(0) - exact.amin(0)).max())
        if not self.average_copies:
            raise ConversionError(
                f"{self.folder}: {key} must be the same on all ranks, but differs by up to {difference:.3g} "
                "between them; pass --average-copies to take the mean, if the ranks drifted apart in the "
                "run, as those of GPT-NeoX-20B did; else copy the checkpoint again"
            )
        self.differences[key] = difference
        return exact.mean(0).to(copies.dtype)

    def row_chunks(self, key: Key, rank: int) -> Iterator[Tensor]:
        """Yield the rows of the tensor of a rank, some at a time."""
        shape = self.parts[key][rank].shape
        row = prod(shape[1:])
        step = max(1, CHUNK // max(1, row))
        for start in range(0, shape[0], step):
            stop = min(shape[0], start + step)
            yield self._elements(key, rank, start * row, stop * row).view(stop - start, *shape[1:])

    def _elements(self, key: Key, rank: int, start: int, stop: int) -> Tensor:
        """Return a copy of a part; the file is mapped only meanwhile, because pages count as memory."""
        part = self.parts[key][rank]
        found: Any = read_record(part.path)
        for name in part.place:
            found = found[name]
        values: Tensor = found.detach().reshape(-1)[start:stop].clone()
        if not bool(values.isfinite().all()):
            raise ConversionError(
                f"{part.path}: {key.name} contains values that are not finite; convert another checkpoint"
            )
        return values


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[tuple[int, ...], Path]:
    """Return files by the numbers in their names."""
    found = {path: pattern.fullmatch(path.name) for path in sorted(folder.iterdir())}
    return {tuple(map(int, match.groups())): path for path, match in found.items() if match}


def _same_state(paths: Mapping[int, Path]) -> dict[str, Any]:
    """Return the recorded state of rank 0; the iteration and the arguments are the same on all ranks."""
    states = {}
    for rank, path in sorted(paths.items()):
        record = read_record(path)
        states[rank] = {name: value for name, value in record.items() if name not in ("module", "optimizer")}
        for name in _COMPARED:
            try:
                text = json.dumps(record.get(name), default=repr, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise ConversionError(
                    f"{path} records {name} with values that are not plain ({error}); only checkpoints of "
                    "GPT-NeoX itself are read"
                ) from error
            states[rank][name] = json.loads(text)
            if states[rank][name] != states[0][name]:
                raise ConversionError(f"{path} records another {name} than {paths[0].name}; {_COMPLETE}")
    return states[0]


def _of_layers(paths: Mapping[tuple[int, ...], Path]) -> dict[Key, dict[int, _Part]]:
    """Return the tensors in files of layers."""
    found: dict[Key, dict[int, _Part]] = {}
    for (layer, rank), path in sorted(paths.items()):
        for name, tensor in _tensors(path, read_record(path)):
            place = _Part(path, (name,), tuple(tensor.shape), tensor.dtype)
            found.setdefault(Key(layer, name), {})[rank] = place
    return found


def _of_ranks(paths: Mapping[int, Path]) -> dict[Key, dict[int, _Part]]:
    """Return the tensors in files of ranks."""
    found: dict[Key, dict[int, _Part]] = {}
    for rank, path in paths.items():
        module = read_record(path).get("module")
        if not isinstance(module, Mapping) or not module:
            raise ConversionError(
                f"{path.parent} contains no weights: neither files of layers "
                f"(layer_00-model_00-model_states.pt) nor the entry module in {path.name}; {_COMPLETE}"
            )
        for name, tensor in _tensors(path, module):
            match = _SEQUENTIAL.fullmatch(name)
            if match is None:
                raise ConversionError(
                    f"{path} contains {name}, but the weights of GPT-NeoX begin with sequential.N.; pass a "
                    "checkpoint that GPT-NeoX wrote"
                )
            place = _Part(path, ("module", name), tuple(tensor.shape), tensor.dtype)
            found.setdefault(Key(int(match[1]), match[2]), {})[rank] = place
    return found


def _tensors(path: Path, record: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in record.items():
        if not isinstance(value, Tensor):
            raise ConversionError(
                f"{path}: {name} is not a tensor; only layers of plain tensors are read (TransformerEngine "
                "stores states between them)"
            )
        yield name, value
