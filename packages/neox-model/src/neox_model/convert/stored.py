"""The weights of a checkpoint of ours, which are read tensor by tensor."""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.dtypes import DTYPES
from neox_model.checkpoint.names import in_model_order
from neox_model.checkpoint.shards import ShardReader
from neox_model.convert.errors import ConversionError
from neox_model.convert.weights import CHUNK

__all__ = ["StoredWeights"]


class StoredWeights:
    """The weights in a checkpoint.

    Args:
        folder: its folder (SAVE/global_step100).

    Attributes:
        manifest: its manifest.

    Raises:
        CheckpointError: it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self._reader = ShardReader(folder, self.manifest)

    @property
    def vocab_size(self) -> int:
        """Return the rows of the token embedding.

        Raises:
            ConversionError: it is missing.
        """
        found = self.manifest.tensors.get(TOKEN_EMBEDDING)
        if found is None or not found.shape:
            raise ConversionError(f"{self.folder} contains no {TOKEN_EMBEDDING}; save it again")
        return found.shape[0]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by name, in the order of the model."""
        return {
            name: self.manifest.tensors[name].shape for name in in_model_order(self.manifest.weight_names)
        }

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a weight."""
        return DTYPES[self.manifest.tensors[name].dtype]

    def whole(self, name: str) -> Tensor:
        """Return a weight in its stored dtype."""
        record = self.manifest.tensors[name]
        values = torch.empty(prod(record.shape), dtype=DTYPES[record.dtype])
        self._fill(name, values, 0)
        return values.view(record.shape)

    def row_chunks(self, name: str, count: int | None = None) -> Iterator[Tensor]:
        """Yield the first `count` rows of a weight (None: all), some at a time, in the stored dtype."""
        shape = self.manifest.tensors[name].shape
        row = prod(shape[1:])
        step = max(1, CHUNK // max(1, row))
        total = shape[0] if count is None else count
        for start in range(0, total, step):
            yield self.rows(name, start, min(total, start + step))

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return some rows of a weight in its stored dtype."""
        row = self.manifest.tensors[name].shape[1:]
        values = torch.empty((stop - start, *row), dtype=self.dtype(name))
        self._fill(name, values.view(-1), start * prod(row))
        return values

    def _fill(self, name: str, values: Tensor, start: int) -> None:
        record = self.manifest.tensors[name]
        block = tuple((0, length) for length in record.shape)
        self._reader.fill(values, name, (block, start, start + values.numel()))
