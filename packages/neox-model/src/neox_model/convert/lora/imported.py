"""Adapters of PEFT as ours."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from neox_config.facts.adapters import ADAPTED
from neox_config.pluralize import pluralize
from neox_model.checkpoint.stream import StreamedTensor
from neox_model.convert.errors import ConversionError
from neox_model.convert.lora.exported import PREFIX, WEIGHTS, A, B, Matrix
from neox_model.convert.lora.options import Options
from neox_model.convert.lora.packing import Packing
from neox_model.convert.weights import WeightFiles

__all__ = ["Imported"]

_SIDES = (".adapter.a", ".adapter.b")
_MERGE = (
    "merge them into the model with peft (merge_and_unload), and convert the model with neox-convert from-hf"
)
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
    """

    def __init__(self, folder: Path, options: Options, matrices: list[Matrix]) -> None:
        if not (folder / WEIGHTS).is_file():
            raise ConversionError(
                f"{folder} contains no {WEIGHTS}; pass the folder of adapters that peft saved; load those of "
                "adapter_model.bin with peft, and save them again"
            )
        self._files = WeightFiles(folder, single=WEIGHTS)
        self._check_names(matrices, options.rank)
        parts: dict[str, tuple[int, ...]] = {}
        first: dict[str, Matrix] = {}
        for matrix in matrices:
            names = [f"{PREFIX}{name}{A}" in self._files.tensors for name in matrix.theirs]
            parts[matrix.ours] = tuple(part for part, is_there in enumerate(names) if is_there)
            other = first.setdefault(matrix.kind, matrix)
            if parts[other.ours] != parts[matrix.ours]:
                raise ConversionError(
                    f"{folder} adapts {matrix.ours} and {other.ours} differently, but neox-model adapts the "
                    f"same matrices in every layer; {_MERGE}"
                )
        self.matrices = [matrix for matrix in matrices if parts[matrix.ours]]
        self.kinds = [kind for kind in ADAPTED if any(matrix.kind == kind for matrix in self.matrices)]
        # Those whose parts do not all have one A.
        apart = {matrix.kind for matrix in self.matrices if not self._has_one_a(matrix)}
        stacked = {kind: parts[first[kind].ours] for kind in self.kinds if kind in apart}
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
                f"{pluralize(len(unknown), 'tensor')}), for "
                "which neox-model has no adapter: it adapts the projections of attention and of the "
                f"feed-forward block; {_MERGE}"
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
        """Yield the values of a tensor of ours."""
        (matrix,) = (each for each in self.matrices if name.startswith(f"{each.ours}."))
        (dtype,) = {found.dtype for found in self._files.tensors.values()}
        rank, parts = self.packing.our_rank, []
        values = torch.zeros(rank, matrix.weight.shape[1], dtype=dtype)
        places = self.packing.places(matrix.kind, len(matrix.theirs))
        for theirs, place, (outputs, _) in zip(matrix.theirs, places, matrix.sides(), strict=True):
            if name.endswith(_SIDES[0]):
                if place is not None:
                    values[place] = self._files.whole(f"{PREFIX}{theirs}{A}")
                continue
            part = torch.zeros(outputs, rank, dtype=dtype)
            if place is not None:
                part[:, place] = self._files.whole(f"{PREFIX}{theirs}{B}")
            parts.append(part.t() if matrix.weight.form.is_transposed else part)
        if parts:
            values = matrix.weight.joined(tuple(parts)).contiguous()
        if not bool(values.isfinite().all()):
            raise ConversionError(
                f"{self._files.folder}: the adapter of {', '.join(matrix.theirs)} contains values that are "
                "not finite; convert another one"
            )
        yield values
