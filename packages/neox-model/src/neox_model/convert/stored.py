"""The weights of a checkpoint of ours, which are read tensor by tensor."""

from pathlib import Path

import torch
from torch import Tensor

from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.dtypes import DTYPES
from neox_model.checkpoint.names import in_model_order
from neox_model.checkpoint.shards import ShardReader
from neox_model.convert.errors import ConversionError
from neox_model.convert.weights import TensorReader

__all__ = ["StoredWeights"]


class StoredWeights(TensorReader):
    """The weights in a checkpoint.

    Args:
        folder: its folder (SAVE/global_step100).
        averages: read the averages of the weights instead.

    Attributes:
        manifest: its manifest.

    Raises:
        CheckpointError: it is damaged.
    """

    def __init__(self, folder: Path, *, averages: bool = False) -> None:
        self.folder = folder
        manifest = Manifest.read(folder)
        self.manifest = manifest.with_averages() if averages else manifest
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

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight."""
        return self.manifest.tensors[name].shape

    def elements(self, name: str, start: int, stop: int) -> Tensor:
        """Return some elements of a weight, in row-major order."""
        return self._reader.values(name, start, stop)
