"""The second phase of 1-bit optimizers: a frozen variance, and momenta that replicas average with one bit."""

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from neox_model.extras.one_bit.compressed_average import CompressedAverage, Compressible
from neox_model.optim.split_weights import whole_norms
from neox_model.parallel.groups import Group, part_length
from neox_model.parallel.logical import whole_shape_of

__all__ = ["REPLICA_STATES", "AveragesMomenta", "FrozenPhase"]

# Kinds as in `checkpoint/replica_states.py`.
REPLICA_STATES: Mapping[str, str] = {"worker_error": "own", "server_error": "part"}

State = MutableMapping[str, Any]

# Of the root mean square over a tensor.
_SMALLEST_ROOT = 0.1


class FrozenPhase:
    """Says when an optimizer's variance is frozen, and averages momenta from then on.

    Args:
        optimizer: its states are `step`, `exp_avg` and `exp_avg_sq`, by weight.
        freeze_step: number of updates before the freeze.
        group: the data-parallel ranks.
        model_group: the ranks that share each layer's matrices.

    Attributes:
        average: averages the momenta, and counts the bytes.
    """

    def __init__(self, optimizer: Optimizer, *, freeze_step: int, group: Group, model_group: Group) -> None:
        self.average = CompressedAverage(group)
        self._model_group = model_group
        # Of each weight the frozen mean square, and the smallest root computed from it.
        self._smallest_roots: dict[Tensor, tuple[Tensor, Tensor]] = {}
        self._optimizer = optimizer
        self._freeze_step = freeze_step
        # The count on the host, and the states that it was read from: a checkpoint replaces the states.
        self._updates = 0
        self._counted_in: list[Tensor] = []

    @property
    def updates(self) -> int:
        """Return the number of applied updates."""
        steps = [state["step"] for state in self._optimizer.state.values() if "step" in state]
        if list(map(id, steps)) != list(map(id, self._counted_in)):
            # Weights whose gradients begin later have a smaller count.
            self._updates, self._counted_in = max(map(int, steps), default=0), steps
        return self._updates

    @property
    def is_next(self) -> bool:
        """Return True if the next update belongs to it."""
        return self.updates >= self._freeze_step

    def count_update(self) -> None:
        """Count one update."""
        self._updates += 1

    def note_smallest_roots(self, weights: Sequence[Tensor]) -> None:
        """Compute the smallest roots of weights for `root`. Collective over tensor-parallel ranks."""
        squares = [self._optimizer.state[weight]["exp_avg_sq"] for weight in weights]
        known = [self._smallest_roots[weight][0] for weight in weights if weight in self._smallest_roots]
        if list(map(id, known)) == list(map(id, squares)):
            return
        norms = torch.stack([square.sum().sqrt() for square in squares]).unsqueeze(1)
        whole = whole_norms(weights, norms, self._model_group)[:, 0]
        for weight, square, norm in zip(weights, squares, whole, strict=True):
            smallest = _SMALLEST_ROOT * norm / math.sqrt(whole_shape_of(weight).numel())
            self._smallest_roots[weight] = square, smallest

    def forget_smallest_roots(self) -> None:
        """Compute the smallest roots again in the next frozen update, because the mean squares change."""
        self._smallest_roots.clear()

    def root(self, weight: Tensor, square: Tensor) -> Tensor:
        """Return the root of a mean square, at least a tenth of the whole weight's frozen root mean square.

        After a compression every element of a momentum has the magnitude of the tensor's mean. Where
        gradients were rare or tiny before the freeze (the embedding of a rare token, the bias of keys), the
        mean square has decayed to almost nothing, and a division by its root would move the element without
        bound.

        Args:
            weight: a weight of `note_smallest_roots`.
            square: a running mean of its squared gradients.
        """
        return square.sqrt().clamp_(min=self._smallest_roots[weight][1])

    def take_gradient(self, state: State, gradient: Tensor, beta: float) -> None:
        """Take a replica's own gradient into a weight's momentum.

        Elements that had no gradient before the freeze have the mean square zero, by which no momentum can be
        divided, and one bit cannot represent the momentum zero: theirs stays zero.
        """
        state.setdefault("frozen_step", state["step"].clone())
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - beta).mul_(state["exp_avg_sq"] > 0)

    def average_momenta(self, states: Sequence[State]) -> None:
        """Average the momenta of these weights over replicas. Collective over the data group."""
        if self.average.group.size > 1:
            self.average([self._compressible(state) for state in states])

    def _compressible(self, state: State) -> Compressible:
        """Return a weight's momentum, with errors of zero before the first compression."""
        momentum = state["exp_avg"]
        if "worker_error" not in state:
            state["worker_error"] = torch.zeros_like(momentum)
        if "server_error" not in state:
            length = part_length(momentum.numel(), self.average.group.size)
            state["server_error"] = momentum.new_zeros(length)
        return Compressible(
            values=momentum,
            is_live=state["exp_avg_sq"] > 0,
            worker_error=state["worker_error"],
            server_error=state["server_error"],
        )


class AveragesMomenta:
    """What the update and checkpoints read of an optimizer with a frozen phase.

    Attributes:
        replica_states: states that differ between replicas -> their kind (`checkpoint/replica_states.py`).
    """

    replica_states: Mapping[str, str] = REPLICA_STATES
    _frozen: FrozenPhase

    @property
    def data_group(self) -> Group:
        """Return the data-parallel ranks."""
        return self.average.group

    @property
    def average(self) -> CompressedAverage:
        """Return what averages the momenta, and counts the bytes."""
        return self._frozen.average

    @property
    def averages_itself(self) -> bool:
        """Return True if the next update requires gradients that are not averaged over replicas."""
        return self._frozen.is_next
