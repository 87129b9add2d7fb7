"""Read the pairs of matrices in a checkpoint of adapters, in one process."""

from math import prod
from pathlib import Path

import torch
from torch import Tensor

from neox_config.facts.adapters import adapter_scale
from neox_model.checkpoint.base import record_in
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.shards import ShardReader

__all__ = ["Adapters", "whole_tensor"]

_SIDES = (".adapter.a", ".adapter.b")


class Adapters:
    """The adapters in a checkpoint.

    Args:
        folder: one checkpoint of adapters.

    Attributes:
        manifest: its manifest.
        matrices: names of the adapted matrices, such as layers.0.attention.qkv.
        scale: factor of the products B A.

    Raises:
        CheckpointError: the checkpoint is damaged, or contains no adapters.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        if record_in(self.manifest) is None:
            raise CheckpointError(
                f"{folder} is not a checkpoint of adapters (LoRA) but of a whole model; pass a folder that a "
                "training with lora-rank saved"
            )
        self._reader = ShardReader(folder, self.manifest.files)
        names = self.manifest.weight_names
        self.matrices = {name.removesuffix(side) for side in _SIDES for name in names if name.endswith(side)}
        if names != {matrix + side for matrix in self.matrices for side in _SIDES}:
            raise CheckpointError(f"{folder} does not contain whole adapters; restore it from a copy")
        config = self.manifest.config
        self.scale = adapter_scale(rank=config["lora_rank"], alpha=config["lora_alpha"])

    def pair(self, matrix: str) -> tuple[Tensor, Tensor]:
        """Return A (rank by inputs) and B (outputs by rank) of a matrix, whole and in float32.

        Raises:
            CheckpointError: they are damaged.
        """
        a, b = (whole_tensor(self._reader, self.manifest, f"{matrix}{side}") for side in _SIDES)
        return a, b

    def product(self, matrix: str) -> Tensor:
        """Return what is added to a weight, in float64."""
        a, b = self.pair(matrix)
        return self.scale * (b.double() @ a.double())


def whole_tensor(reader: ShardReader, manifest: Manifest, name: str) -> Tensor:
    """Return a weight of a checkpoint, whole and in float32.

    Raises:
        CheckpointError: it is damaged.
    """
    record = manifest.tensors[name]
    wanted = (tuple((0, length) for length in record.shape), 0, prod(record.shape))
    reader.check_sums([(record, wanted)])
    # Float32 holds every value of the dtypes in which weights are stored.
    target = torch.empty(prod(record.shape))
    reader.check(name, record, wanted, target.dtype)
    reader.fill(target, name, record, wanted)
    return target.view(record.shape)
