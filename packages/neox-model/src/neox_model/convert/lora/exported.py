"""Adapters of ours as PEFT stores them.

B of a matrix that they store in several parts (query, key and value) has the rows of these parts in the order
of ours; each part gets its rows of B, and the same A, or its own part of a stacked A.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox_config.pluralize import pluralize
from neox_model.checkpoint.adapters import Adapters, adaptable
from neox_model.checkpoint.dtypes import DTYPES
from neox_model.checkpoint.stream import StreamedTensor
from neox_model.convert.checkpoints import Checkpoint
from neox_model.convert.errors import ConversionError
from neox_model.convert.families import Family
from neox_model.convert.families.family import Tensors
from neox_model.convert.lora.packing import PEFT, Packing
from neox_model.convert.stored import StoredWeights

__all__ = ["PREFIX", "WEIGHTS", "A", "B", "Exported", "Matrix", "matrices_of"]

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class Matrix:
    """An adapted matrix of ours, and theirs."""

    ours: str
    weight: Tensors

    @property
    def kind(self) -> str:
        """Return its name in `lora-target-modules`."""
        return self.ours.rpartition(".")[2]

    @property
    def theirs(self) -> list[str]:
        """Return the names of their modules."""
        return [name.removesuffix(".weight") for name in self.weight.theirs]

    def sides(self) -> list[tuple[int, int]]:
        """Return the outputs and inputs of their modules."""
        shapes = self.weight.theirs.values()
        return [(shape[1], shape[0]) if self.weight.form.is_transposed else shape for shape in shapes]  # type: ignore[misc]


def matrices_of(family: Family, base: Checkpoint) -> list[Matrix]:
    """Return the matrices of the layers of a base that an adapter may have.

    Args:
        family: the class of transformers.
        base: the base.
    """
    shapes = {f"{name}.weight": shape for name, shape in adaptable(base.shapes).items() if len(shape) == 2}
    return [Matrix(each.ours.removesuffix(".weight"), each) for each in family.tensors(base.model, shapes)]


class Exported:
    """The adapters as PEFT stores them.

    Args:
        adapters: ours.
        base: the weights of their base.
        family: the class of transformers.
        matrices: those of the base that an adapter may have.
    """

    def __init__(
        self, adapters: Adapters, base: StoredWeights, family: Family, matrices: Iterable[Matrix]
    ) -> None:
        self.adapters, self._family = adapters, family
        adapters.check_base(base.folder, base.shapes)
        self.matrices = [matrix for matrix in matrices if matrix.ours in adapters.matrices]
        others = sorted(adapters.matrices - {matrix.ours for matrix in self.matrices})
        if others:
            raise ConversionError(
                f"{adapters.folder} has adapters of {others[0]}, the matrices of all experts in one, but "
                "peft adapts modules with one matrix; merge the adapters (neox-checkpoint merge), or adapt "
                "others (lora-target-modules)"
            )
        for matrix in self.matrices:
            whole, parts = family.joined_parts(next(iter(matrix.weight.theirs)))
            if len(parts) > 1:
                raise ConversionError(
                    f"{family.class_name} stores {matrix.ours} with another matrix as {whole}, which peft "
                    "adapts as one; merge the adapters (neox-checkpoint merge), or adapt others "
                    "(lora-target-modules)"
                )
        self.packing = Packing.of(adapters.section, adapters.manifest.config.get(PEFT))

    @cached_property
    def is_transposed(self) -> bool:
        """Return whether their matrices are stored as input by output."""
        return any(matrix.weight.form.is_transposed for matrix in self.matrices)

    def _parts(self, matrix: Matrix) -> Iterator[tuple[int, str, slice]]:
        """Yield number, name and place of the parts of a matrix with an adapter."""
        names = matrix.theirs
        for part, (name, place) in enumerate(
            zip(names, self.packing.places(matrix.kind, len(names)), strict=True)
        ):
            if place is not None:
                yield part, name, place

    def _dtype(self, matrix: Matrix) -> torch.dtype:
        return DTYPES[self.adapters.manifest.tensors[f"{matrix.ours}.adapter.a"].dtype]

    def planned(self) -> list[StreamedTensor]:
        """Return names, shapes and dtypes."""
        rank, found = self.packing.rank, []
        for matrix in self.matrices:
            sides, dtype = matrix.sides(), self._dtype(matrix)
            for part, name, _ in self._parts(matrix):
                outputs, inputs = sides[part]
                found.append(StreamedTensor(f"{PREFIX}{name}{A}", (rank, inputs), dtype))
                found.append(StreamedTensor(f"{PREFIX}{name}{B}", (outputs, rank), dtype))
        return found

    def values(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield the values of each tensor."""
        for matrix in self.matrices:
            a, b = (side.to(self._dtype(matrix)) for side in self.adapters.pair(matrix.ours))
            if not bool(a.isfinite().all() and b.isfinite().all()):
                raise ConversionError(
                    f"{self.adapters.folder}: the adapter of {matrix.ours} contains values that are not "
                    "finite; export another checkpoint"
                )
            rows = matrix.weight.form.rows_to_theirs(b, matrix.weight.attention)
            missing = int(b.count_nonzero())
            for part, name, place in self._parts(matrix):
                values = rows[part][:, place].contiguous()
                missing -= int(values.count_nonzero())
                yield f"{PREFIX}{name}{A}", [a[place].contiguous()]
                yield f"{PREFIX}{name}{B}", [values]
            if missing:
                of_adapter = f"of the adapter of {matrix.ours}"
                lost = pluralize(missing, f"value {of_adapter} is", f"values {of_adapter} are")
                raise ConversionError(
                    f"{self.adapters.folder}: {lost} not where its manifest records those of peft; restore "
                    "it from a copy"
                )

    @property
    def modules(self) -> list[str]:
        """Return the names of the adapted modules in a layer, with the name of its part.

        Others may end with the same word.
        """
        adapted = {matrix.ours.split(".", 2)[2]: matrix for matrix in self.matrices}
        rows = [row for row in self._family.in_layer if row.ours in adapted]
        return [row.theirs[part] for row in rows for part, _, _ in self._parts(adapted[row.ours])]

    def settings(self, model: Path) -> dict[str, Any]:
        """Return the contents of `adapter_config.json`."""
        alpha = self.packing.alpha
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(model.absolute()),
            "inference_mode": True,
            "r": self.packing.rank,
            "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
            "lora_dropout": self.adapters.section.lora_dropout,
            "target_modules": self.modules,
            "fan_in_fan_out": self.is_transposed,
            "bias": "none",
        }
