"""The second phase of 1-bit optimizers: a frozen variance, and momenta that replicas average with one bit."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from neox_model.parallel.compressed_average import CompressedAverage, Compressible, part_length
from neox_model.parallel.groups import Group

__all__ = ["REPLICA_STATES", "FrozenPhase", "frozen_root"]

# Kinds as in `checkpoint/replica_states.py`.
REPLICA_STATES: Mapping[str, str] = {"worker_error": "own", "server_error": "part"}

State = MutableMapping[str, Any]

# Of the root mean square over a tensor.
_SMALLEST_ROOT = 0.1


def frozen_root(square: Tensor) -> Tensor:
    """Return the root of a mean square, at least a tenth of its root mean square over the tensor.

    After a compression every element of a momentum has the magnitude of the tensor's mean. Where gradients
    were rare or tiny before the freeze (the embedding of a rare token, the bias of keys), the mean square has
    decayed to almost nothing, and a division by its root would move the element without bound.

    Args:
        square: running mean of squared gradients, of one tensor on this rank.
    """
    root = square.sqrt()
    return root.clamp_(min=_SMALLEST_ROOT * square.mean().sqrt())


class FrozenPhase:
    """Says when an optimizer's variance is frozen, and averages momenta from then on.

    Args:
        optimizer: its states are `step`, `exp_avg` and `exp_avg_sq`, by weight.
        freeze_step: number of updates before the freeze.
        group: the data-parallel ranks.

    Attributes:
        average: averages the momenta, and counts the bytes.
    """

    def __init__(self, optimizer: Optimizer, *, freeze_step: int, group: Group) -> None:
        self.average = CompressedAverage(group)
        self._optimizer = optimizer
        self._freeze_step = freeze_step
        # The count on the host, and the states that it was read from: a checkpoint replaces the states.
        self._updates = 0
        self._counted_in: list[Tensor] = []

    @property
    def is_next(self) -> bool:
        """Return True if the next update belongs to it."""
        steps = [state["step"] for state in self._optimizer.state.values() if "step" in state]
        if list(map(id, steps)) != list(map(id, self._counted_in)):
            # Weights whose gradients begin later have a smaller count.
            self._updates, self._counted_in = max(map(int, steps), default=0), steps
        return self._updates >= self._freeze_step

    def count_update(self) -> None:
        """Count one update."""
        self._updates += 1

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
