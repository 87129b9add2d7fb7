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
from neox_model.checkpoint.names import in_model_order, is_random_state, is_weight
from neox_model.checkpoint.shards import ShardReader
from neox_model.verify.rounding import Limits
from neox_model.verify.ulps import distance_of

__all__ = ["State", "TensorDifference", "differences", "differences_beyond_rounding"]


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
        numel = prod(self.manifest.tensors[name].shape)
        for start in range(0, numel, _CHUNK):
            yield self._reader.values(name, start, min(numel, start + _CHUNK))


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
        distance = distance_of(zip(expected.chunks(name), found.chunks(name), strict=True))
        if distance.differing:
            yield TensorDifference(name, str(distance), distance.relative_norm)


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
