"""Adapters of PEFT as ours."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from neox_config.counted import counted
from neox_config.facts.adapters import ADAPTED
from neox_model.checkpoint.stream import StreamedTensor
from neox_model.convert.errors import ConversionError
from neox_model.convert.lora.exported import PREFIX, WEIGHTS, A, B, Matrix
from neox_model.convert.lora.options import Options
from neox_model.convert.lora.packing import Packing
from neox_model.convert.weights import WeightFiles

__all__ = ["Imported"]

_SIDES = (".adapter.a", ".adapter.b")
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


class Imported:
    """The adapters in a folder of PEFT, as ours.

    Args:
        folder: theirs.
        options: those in it.
        matrices: those of the base that an adapter may have.

    Attributes:
        matrices: the adapted matrices.
        packing: where theirs lie in ours.
        kinds: names of the adapted matrices in a layer, for `lora-target-modules`.

    Raises:
        ConversionError: ours cannot have these adapters, or a tensor is missing or of another shape.
    """

    def __init__(self, folder: Path, options: Options, matrices: list[Matrix]) -> None:
        if not (folder / WEIGHTS).is_file():
            raise ConversionError(
                f"{folder} contains no {WEIGHTS}; pass the folder of adapters that peft saved; load those of "
                "adapter_model.bin with peft, and save them again"
            )
        self._files = WeightFiles(folder, single=WEIGHTS)
        self._check_names(matrices, options.rank)
        parts = {matrix.ours: self._adapted_parts(matrix) for matrix in matrices}
        self._check_layers(matrices, parts)
        self.matrices = [matrix for matrix in matrices if parts[matrix.ours]]
        self.kinds = [kind for kind in ADAPTED if any(matrix.kind == kind for matrix in self.matrices)]
        stacked = {kind: parts[first] for kind, first in self._apart()}
        self.packing = Packing(options.rank, options.alpha, stacked)

    def _check_names(self, matrices: list[Matrix], rank: int) -> None:
        """Check that the stored tensors are adapters of matrices that ours can adapt, and their shapes."""
        expected: dict[str, tuple[int, ...]] = {}
        for matrix in matrices:
            for name, (outputs, inputs) in zip(matrix.theirs, matrix.sides(), strict=True):
                expected |= {f"{PREFIX}{name}{A}": (rank, inputs), f"{PREFIX}{name}{B}": (outputs, rank)}
        stored = self._files.tensors
        unknown = sorted(stored.keys() - expected.keys())
        if unknown:
            raise ConversionError(
                f"{self._files.folder} contains {', '.join(unknown[:3])} (of "
                f"{counted(len(unknown), 'tensor')}), for "
                "which neox-model has no adapter: it adapts the projections of attention and of the "
                "feed-forward block; merge them into the model with peft (merge_and_unload), and convert the "
                "model with neox-convert from-hf"
            )
        if not stored:
            raise ConversionError(f"{self._files.folder / WEIGHTS} contains no adapters; copy it again")
        for name, found in stored.items():
            pair = name.replace(A, B) if name.endswith(A) else name.replace(B, A)
            if pair not in stored:
                raise ConversionError(f"{self._files.folder} contains {name} without {pair}; copy it again")
            if found.shape != expected[name]:
                raise ConversionError(
                    f"{self._files.folder}: {name} has the shape {found.shape}, but the base and the rank "
                    f"{rank} require {expected[name]}; pass the base of the adapters"
                )
        dtypes = {found.dtype for found in stored.values()}
        if len(dtypes) > 1 or not dtypes <= _DTYPES:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise ConversionError(
                f"{self._files.folder}: its tensors are {names}, not all float32, all bfloat16 or all "
                "float16; load the adapters with peft in one of these dtypes and save them again"
            )

    def _adapted_parts(self, matrix: Matrix) -> tuple[int, ...]:
        names = enumerate(matrix.theirs)
        return tuple(part for part, name in names if f"{PREFIX}{name}{A}" in self._files.tensors)

    def _check_layers(self, matrices: list[Matrix], parts: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the same matrices are adapted in every layer."""
        first: dict[str, Matrix] = {}
        for matrix in matrices:
            other = first.setdefault(matrix.kind, matrix)
            if parts[other.ours] != parts[matrix.ours]:
                raise ConversionError(
                    f"{self._files.folder} adapts {matrix.ours} and {other.ours} differently; neox-model "
                    "adapts the same matrices in every layer: merge the adapters into the model with peft "
                    "(merge_and_unload), and convert the model with neox-convert from-hf"
                )

    def _apart(self) -> Iterator[tuple[str, str]]:
        """Yield the kinds of matrices whose parts do not all have one A, each with its first matrix."""
        for kind in self.kinds:
            same = [each for each in self.matrices if each.kind == kind]
            if not all(self._has_one_a(each) for each in same):
                yield kind, same[0].ours

    def _has_one_a(self, matrix: Matrix) -> bool:
        names = [f"{PREFIX}{name}{A}" for name in matrix.theirs]
        if not all(name in self._files.tensors for name in names):
            return False
        first, *others = (self._files.whole(name) for name in names)
        return all(torch.equal(first, other) for other in others)

    def planned(self) -> list[StreamedTensor]:
        """Return names, shapes and dtypes of ours."""
        (dtype,) = {found.dtype for found in self._files.tensors.values()}
        rank, found = self.packing.our_rank, []
        for matrix in self.matrices:
            outputs, inputs = matrix.weight.shape
            for side, shape in zip(_SIDES, ((rank, inputs), (outputs, rank)), strict=True):
                found.append(StreamedTensor(f"{matrix.ours}{side}", shape, dtype))
        return found

    def values(self, name: str) -> Iterator[Tensor]:
        """Yield the values of a tensor of ours.

        Raises:
            ConversionError: one is not finite.
        """
        (matrix,) = (each for each in self.matrices if name.startswith(f"{each.ours}."))
        values = self._a(matrix) if name.endswith(_SIDES[0]) else self._b(matrix)
        if not bool(values.isfinite().all()):
            raise ConversionError(
                f"{self._files.folder}: the adapter of {', '.join(matrix.theirs)} contains values that are "
                "not finite; convert another one"
            )
        yield values

    def _places(self, matrix: Matrix) -> Iterator[tuple[str, slice | None]]:
        names = matrix.theirs
        return zip(names, self.packing.places(matrix.kind, len(names)), strict=True)

    def _a(self, matrix: Matrix) -> Tensor:
        dtype = next(iter(self._files.tensors.values())).dtype
        whole = torch.zeros(self.packing.our_rank, matrix.weight.shape[1], dtype=dtype)
        for name, place in self._places(matrix):
            if place is not None:
                whole[place] = self._files.whole(f"{PREFIX}{name}{A}")
        return whole

    def _b(self, matrix: Matrix) -> Tensor:
        dtype = next(iter(self._files.tensors.values())).dtype
        parts = []
        for (name, place), (outputs, _) in zip(self._places(matrix), matrix.sides(), strict=True):
            part = torch.zeros(outputs, self.packing.our_rank, dtype=dtype)
            if place is not None:
                part[:, place] = self._files.whole(f"{PREFIX}{name}{B}")
            parts.append(part.t() if matrix.weight.form.is_transposed else part)
        return matrix.weight.joined(tuple(parts)).contiguous()
