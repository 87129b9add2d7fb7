"""Read the pairs of matrices in a checkpoint of adapters, in one process."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from neox_config.facts.adapters import adapter_scale
from neox_config.schema.sections.adapters import AdaptersSection
from neox_model.checkpoint.base import record_in
from neox_model.checkpoint.blocks import whole_block
from neox_model.checkpoint.contents import Manifest, first_problem
from neox_model.checkpoint.errors import CheckpointError, DamagedManifestError, quoted
from neox_model.checkpoint.shards import ShardReader

__all__ = ["Adapters", "adaptable", "whole_tensor"]

_SIDES = (".adapter.a", ".adapter.b")
# What determines the products; the folder of the base is recorded with its checksum.
_RECORDED = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")


class Adapters:
    """The adapters in a checkpoint.

    Args:
        folder: one checkpoint of adapters.

    Attributes:
        manifest: its manifest.
        base: what it records about its base.
        section: the parameters of the adapters that it records.
        matrices: names of the adapted matrices, such as layers.0.attention.qkv.
        scale: factor of the products B A.

    Raises:
        CheckpointError: the checkpoint is damaged, or contains no adapters.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        base = record_in(self.manifest, folder)
        if base is None:
            raise CheckpointError(
                f"{folder} is not a checkpoint of adapters (LoRA) but of a whole model; pass a folder that a "
                "training with lora-rank saved"
            )
        self.base = base
        self._reader = ShardReader(folder, self.manifest)
        names = self.manifest.weight_names
        self.matrices = {name.removesuffix(side) for side in _SIDES for name in names if name.endswith(side)}
        if not names or names != {matrix + side for matrix in self.matrices for side in _SIDES}:
            raise CheckpointError(f"{folder} does not contain whole adapters; restore it from a copy")
        self.section = _recorded_section(folder, self.manifest.config)
        self.scale = adapter_scale(rank=self.section.lora_rank, alpha=self.section.lora_alpha)

    def check_base(self, base: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the adapters fit a base, before any of them is read.

        Args:
            base: the checkpoint of the base.
            shapes: of its weights, by name.

        Raises:
            CheckpointError: an adapter has no matrix there, one is missing, or has another shape.
        """
        rank, kinds = self.section.lora_rank, self.section.lora_target_modules
        matrices = {
            matrix: shape for matrix, shape in adaptable(shapes).items() if matrix.rpartition(".")[2] in kinds
        }
        unknown, missing = sorted(self.matrices - matrices.keys()), sorted(matrices.keys() - self.matrices)
        if unknown or missing:
            what, does = ("has", "does not have") if unknown else ("lacks", "has")
            names = ", ".join(map(quoted, (unknown or missing)[:3]))
            raise CheckpointError(
                f"{self.folder} {what} adapters of matrices that {base} with lora_target_modules "
                f"{', '.join(kinds)} {does}: {names}; restore it from a copy"
            )
        for matrix, (outputs, inputs) in matrices.items():
            for side, expected in zip(_SIDES, ((rank, inputs), (outputs, rank)), strict=True):
                found = self.manifest.tensors[f"{matrix}{side}"].shape
                if found != expected:
                    raise CheckpointError(
                        f"{self.folder}: {matrix}{side} has the shape {found}, but lora_rank {rank} and the "
                        f"base {base} require {expected}; restore it from a copy"
                    )

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


def adaptable(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """Return the matrices of layers, such as layers.0.attention.qkv, with their outputs and inputs.

    Args:
        shapes: of the weights of a model, by name.
    """
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes.items()
        if name.startswith("layers.") and name.endswith(".weight") and len(shape) == 2
    }


def _recorded_section(folder: Path, config: Mapping[str, Any]) -> AdaptersSection:
    """Return the parameters of adapters that a manifest records.

    Raises:
        DamagedCheckpointError: one is missing, or no adapters can have it.
    """
    try:
        section = AdaptersSection.model_validate({name: config[name] for name in _RECORDED})
        if section.lora_rank:
            return section
        problem = "lora_rank is 0, without which there are no adapters"
    except KeyError as error:
        problem = f"{error.args[0]} is missing"
    except ValidationError as error:
        problem = first_problem(error)
    raise DamagedManifestError(f"config / {problem}", folder)


def whole_tensor(reader: ShardReader, manifest: Manifest, name: str) -> Tensor:
    """Return a weight of a checkpoint, whole and in float32.

    Raises:
        CheckpointError: it is damaged.
    """
    shape = manifest.tensors[name].shape
    # Float32 holds every value of the dtypes in which weights are stored.
    target, wanted = torch.empty(prod(shape)), (whole_block(shape), 0, prod(shape))
    reader.check([(name, wanted, target.dtype)])
    reader.fill(target, name, wanted)
    return target.view(shape)
