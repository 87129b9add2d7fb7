"""Compare two checkpoints tensor by tensor, in chunks."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from neox_config.facts.optimizers import OPTIMIZER_FACTS
from neox_config.pluralize import pluralize
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.dtypes import DTYPES
from neox_model.checkpoint.names import in_model_order, is_random_state, is_weight
from neox_model.checkpoint.shards import ShardReader
from neox_model.verify.rounding import Limits

__all__ = ["BITS", "State", "TensorDifference", "differences", "differences_beyond_rounding", "is_same"]

BITS: Mapping[int, torch.dtype] = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype with the bits of a floating-point number, by its bytes."""

# Number of elements per chunk.
_CHUNK = 2**24
# States that show how large an element's gradients were, and how; the first that a weight has, in its shape,
# is used.
_SIZES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "exp_avg_sq": torch.sqrt,
    "accumulator_0": torch.sqrt,  # SM3's, of a vector.
    "exp_inf": torch.abs,  # Adamax's.
    "exp_avg": torch.abs,  # Lion's.
}
# States of optimizers that differ between data-parallel ranks, with other values for every number of ranks.
_OF_REPLICAS = frozenset(
    name for facts in OPTIMIZER_FACTS.values() for name in (*facts.replica_states, *facts.local_states)
)


class State:
    """The tensors of a checkpoint.

    Args:
        folder: the checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged or cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self._reader = ShardReader(folder, self.manifest)

    def names(self, *, of_weights: bool) -> list[str]:
        """Return the names of weights or of optimizer states, in the order of the model."""
        names = (name for name in self.manifest.tensors if not is_random_state(name))
        return in_model_order(name for name in names if is_weight(name) == of_weights)

    def chunks(self, name: str) -> Iterator[Tensor]:
        """Yield the tensor's values in row-major order, in chunks."""
        record = self.manifest.tensors[name]
        numel, block = prod(record.shape), tuple((0, length) for length in record.shape)
        for start in range(0, numel, _CHUNK):
            values = torch.empty(min(_CHUNK, numel - start), dtype=DTYPES[record.dtype])
            self._reader.fill(values, name, (block, start, start + values.numel()))
            yield values


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs: its name, a description, and the relative difference."""

    name: str
    text: str
    relative: float


def differences(expected: State, found: State, *, of_weights: bool) -> Iterator[TensorDifference]:
    """Compare two checkpoints to the last bit; yield the differences in the order of the model."""
    for name in _compared(expected, found, of_weights=of_weights):
        reason = _unlike(expected, found, name)
        if reason:
            yield TensorDifference(name, reason, math.inf)
            continue
        difference = _Difference()
        for one, other in zip(expected.chunks(name), found.chunks(name), strict=True):
            difference.add(one, other)
        if difference.count:
            text = difference.describe(expected.manifest.tensors[name].shape)
            yield TensorDifference(name, text, difference.relative)


def _compared(expected: State, found: State, *, of_weights: bool) -> list[str]:
    """Return the names to compare, without states of replicas if there are other numbers of these."""
    wanted, there = expected.names(of_weights=of_weights), found.names(of_weights=of_weights)
    names = {*wanted, *there}
    if expected.manifest.layout.data != found.manifest.layout.data:
        names = {name for name in names if name.rpartition("/")[2] not in _OF_REPLICAS}
    return in_model_order(names)


def _unlike(expected: State, found: State, name: str) -> str:
    """Return why two tensors cannot be compared; empty if they can."""
    one, other = expected.manifest.tensors.get(name), found.manifest.tensors.get(name)
    if one is None or other is None:
        return "is missing" if other is None else "is there, and not in the expected state"
    return "" if one.shape == other.shape else f"has the shape {other.shape} instead of {one.shape}"


class _Difference:
    """Accumulated difference between two tensors that are read in chunks."""

    def __init__(self) -> None:
        self.count, self._numel, self._largest, self._scale = 0, 0, -1.0, 0.0
        self._place, self._values = 0, (0.0, 0.0)

    @property
    def relative(self) -> float:
        """Largest difference relative to the largest expected value."""
        return self._largest / self._scale if self._scale else math.inf

    def add(self, expected: Tensor, found: Tensor) -> None:
        """Compare the next chunk."""
        differing = ~is_same(expected, found)
        count = int(differing.sum())
        one, other = expected.double(), found.double()
        if expected.numel():
            self._scale = max(self._scale, float(one.nan_to_num().abs().max()))
        if count:
            size = (one - other).abs().nan_to_num(nan=math.inf)
            size[~differing] = -1.0
            place = int(size.argmax())
            if float(size[place]) > self._largest:
                self._largest = float(size[place])
                self._place = self._numel + place
                self._values = float(one[place]), float(other[place])
        self.count += count
        self._numel += expected.numel()

    def describe(self, shape: tuple[int, ...]) -> str:
        """Describe the number of differing elements, and the largest difference with its position."""
        wanted, found = self._values
        place = (
            [int(index) for index in torch.unravel_index(torch.tensor(self._place), shape)] if shape else []
        )
        return (
            f"{self.count:,} of {self._numel:,} elements differ, by at most {self._largest:.3g}: "
            f"{found:.9g} instead of {wanted:.9g} at {place}"
        )


def is_same(expected: Tensor, found: Tensor) -> Tensor:
    """Compare elementwise: all bits if the dtypes are the same, else values."""
    if expected.dtype != found.dtype:
        return expected.double() == found.double()
    if not expected.is_floating_point():
        return expected == found
    bits = BITS[expected.element_size()]
    return expected.view(bits) == found.view(bits)


def differences_beyond_rounding(
    middle: State, expected: State, found: State, limits: Limits, *, of_weights: bool
) -> Iterator[TensorDifference]:
    """Compare two checkpoints of different layouts.

    Differences of weights are relative to their change since the interruption, those of optimizer states to
    their values.

    Args:
        middle: the state at the interruption.
        expected: the final state of the uninterrupted run.
        found: the final state of the resumed run.
        limits: differences considered rounding.
        of_weights: compare weights; otherwise optimizer states.

    Returns:
        Every tensor with its difference; the text is empty if it is within the limits.
    """
    # The largest root mean square gradient of any tensor, from `_SIZES`; 0 without them.
    loudest = 0.0
    for name in expected.names(of_weights=True):
        sizes = _gradient_sizes(expected, name)
        if sizes is not None:
            total = sum(float(values.square().sum()) for values in sizes)
            loudest = max(loudest, total / prod(expected.manifest.tensors[name].shape))
    loudest = math.sqrt(loudest)
    for name in _compared(expected, found, of_weights=of_weights):
        reason = _unlike(expected, found, name)
        if reason:
            yield TensorDifference(name, reason, math.inf)
            continue
        relative, left_out = _relative_change(middle, expected, found, name, limits.noise * loudest)
        text = ""
        if relative > limits.tensor:
            whole = "its change" if of_weights else "itself"
            skipped = f"; {pluralize(left_out, 'element')} with a noisy gradient skipped" if left_out else ""
            text = f"differs by {relative:.1e} of {whole} (limit {limits.tensor:g}{skipped})"
        yield TensorDifference(name, text, relative)


def _gradient_sizes(state: State, weight: str) -> Iterator[Tensor] | None:
    """Return the sizes of the gradients of a weight's elements, in chunks; None if no state shows them."""
    tensors = state.manifest.tensors
    for key, size in _SIZES.items():
        name = f"{weight}/{key}"
        if name in tensors and weight in tensors and tensors[name].shape == tensors[weight].shape:
            return (size(values.double()) for values in state.chunks(name))
    return None


def _relative_change(
    middle: State, expected: State, found: State, name: str, noise: float
) -> tuple[float, int]:
    """Return the 2-norm of the difference relative to that of the change (weights) or value (states)."""
    weight = name.partition("/")[0]
    has_form = expected.manifest.tensors[name].shape == expected.manifest.tensors[weight].shape
    sizes = _gradient_sizes(expected, weight) if has_form else None
    before = middle.chunks(name) if name == weight and name in middle.manifest.tensors else None
    difference = size = 0.0
    left_out = 0
    for one, other in zip(expected.chunks(name), found.chunks(name), strict=True):
        wanted, there = one.double(), other.double()
        start = 0.0 if before is None else next(before).double()
        apart, change = wanted - there, wanted - start
        if sizes is not None:
            is_loud = next(sizes) >= noise
            left_out += int((~is_loud).sum())
            apart, change = apart[is_loud], change[is_loud]
        difference += float(apart.square().sum())
        size += float(change.square().sum())
    if math.isnan(difference) or (size == 0.0 and difference > 0.0):
        return math.inf, left_out
    return (math.sqrt(difference / size) if size else 0.0), left_out
