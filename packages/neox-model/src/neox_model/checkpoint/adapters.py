"""Read the pairs of matrices in a checkpoint of adapters, and merge them into their base, in one process.

For a merge the weights are read, changed and written one after another, so that memory holds one at a time.
The result is a checkpoint of a whole model without optimizer states; it is a base for other adapters, and
loads wherever the base loads.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from neox_config.facts.adapters import adapter_scale
from neox_config.pluralize import pluralize
from neox_config.schema.sections.adapters import AdaptersSection
from neox_model.checkpoint.base import record_in, recorded_base
from neox_model.checkpoint.blocks import whole_block
from neox_model.checkpoint.contents import Layout, Manifest, first_problem
from neox_model.checkpoint.dtypes import DTYPES
from neox_model.checkpoint.errors import CheckpointError, DamagedManifestError, quoted
from neox_model.checkpoint.names import average_name, is_model_state, model_state_name
from neox_model.checkpoint.shards import ShardReader
from neox_model.checkpoint.stream import StreamedTensor, write_whole_tensors
from neox_model.versions import package_versions

__all__ = ["Adapters", "adaptable", "merge_adapters"]

logger = logging.getLogger(__name__)

_SIDES = (".a", ".b")
_MATRIX = 2
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
                "run with lora-rank saved"
            )
        self.base = base
        self._reader = ShardReader(folder, self.manifest)
        names = self.manifest.weight_names
        self._pairs = {_matrix_of(name): name.rpartition(".")[0] for name in names}
        self.matrices = self._pairs.keys()
        if not names or names != {pair + side for pair in self._pairs.values() for side in _SIDES}:
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
        for matrix, (*number, rows, columns) in matrices.items():
            left, right = (*number, rows, rank), (*number, rank, columns)
            for side, expected in zip(_SIDES, (left, right) if number else (right, left), strict=True):
                name = self._pairs[matrix] + side
                found = self.manifest.tensors[name].shape
                if found != expected:
                    raise CheckpointError(
                        f"{self.folder}: {name} has the shape {found}, but lora_rank {rank} and the "
                        f"base {base} require {expected}; restore it from a copy"
                    )

    def pair(self, matrix: str) -> tuple[Tensor, Tensor]:
        """Return A (rank by inputs) and B (outputs by rank) of a matrix, whole and in float32.

        Those of experts are transposed, with one more dimension.

        Raises:
            CheckpointError: they are damaged.
        """
        a, b = (_whole_tensor(self._reader, self.manifest, self._pairs[matrix] + side) for side in _SIDES)
        return a, b

    def product(self, matrix: str) -> Tensor:
        """Return what is added to a weight, in float64."""
        a, b = (side.double() for side in self.pair(matrix))
        return self.scale * (b @ a if a.dim() == _MATRIX else a @ b)


def adaptable(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the matrices of layers, such as layers.0.attention.qkv, with their outputs and inputs.

    Of those of all experts in one (layers.0.mlp.experts.up): the number of experts, inputs and outputs.

    Args:
        shapes: of the weights of a model, by name.
    """
    return {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if name.startswith("layers.")
        and (len(shape) > _MATRIX or (name.endswith(".weight") and len(shape) == _MATRIX))
    }


def _matrix_of(name: str) -> str:
    """Return the matrix whose adapter's A or B has a name."""
    return name.rpartition(".")[0].removesuffix(".adapter").replace(".adapters.", ".")


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


def _whole_tensor(reader: ShardReader, manifest: Manifest, name: str) -> Tensor:
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


def merge_adapters(adapters: Path, output: Path, *, base: Path | None = None) -> Path:
    """Write the weights of a base with adapters merged into them.

    Args:
        adapters: folder of one checkpoint of adapters.
        output: folder of checkpoints to write to; the checkpoint has the iteration of the adapters.
        base: folder of the checkpoints of the base; None: the one that the adapters name.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: a checkpoint is damaged, it is not one of adapters, or the base is another one.
        OSError: the output cannot be written.
    """
    found = Adapters(adapters)
    folder = recorded_base(found.base, base)
    whole = Manifest.read(folder)
    reader = ShardReader(folder, whole)
    weights = whole.weight_names
    found.check_base(folder, {name: whole.tensors[name].shape for name in sorted(weights)})
    # The averages of the base's weights are not those of the sums.
    averages = {model_state_name(average_name(name)) for name in weights}
    names = sorted(
        name for name in whole.tensors if name in weights or (is_model_state(name) and name not in averages)
    )

    def values(name: str) -> Iterator[Tensor]:
        weight = _whole_tensor(reader, whole, name)
        matrix = name.removesuffix(".weight")
        if matrix in found.matrices:
            weight += found.product(matrix).to(weight.dtype)
        yield weight.to(DTYPES[whole.tensors[name].dtype]) if is_model_state(name) else weight

    merged = replace(
        whole,
        iteration=found.manifest.iteration,
        layout=Layout(data=1, model=1, pipe=1),
        config={**whole.config, **_of_adapters(found.manifest)},
        optimizer=None,
        optimizer_scalars={},
        packages=package_versions(),
    )
    tensors = [
        StreamedTensor(name, record.shape, torch.float32 if name in weights else DTYPES[record.dtype])
        for name, record in ((name, whole.tensors[name]) for name in names)
    ]
    final, _ = write_whole_tensors(merged, tensors, values, output)
    adapters_there, tensors_there = pluralize(len(found.matrices), "adapter"), pluralize(len(names), "tensor")
    logger.info("merged %s into %s", adapters_there, tensors_there)
    return final


def _of_adapters(manifest: Manifest) -> dict[str, Any]:
    """Return the settings of the adapters' training that the merged model keeps.

    The tokenizer is that of the base, but the adapters may have been trained with a copy of its files, and
    the chat template is next to these.
    """
    config = manifest.config
    kept = {"stop_tokens": config["stop_tokens"]} if "stop_tokens" in config else {}
    files = {name: config[name] for name in ("vocab_file", "merge_file") if config.get(name)}
    if all(map(os.path.exists, files.values())):
        kept |= {name: os.path.abspath(path) for name, path in files.items()}
    return kept
