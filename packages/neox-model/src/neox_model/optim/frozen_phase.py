"""The second phase of 1-bit optimizers: a frozen variance, and momenta that replicas average with one bit."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from neox_model.parallel.compressed_average import CompressedAverage, Compressible, part_length
from neox_model.parallel.groups import Group

__all__ = ["REPLICA_STATES", "FrozenPhase"]

# Kinds as in `checkpoint/replica_states.py`.
REPLICA_STATES: Mapping[str, str] = {"worker_error": "own", "server_error": "part"}

State = MutableMapping[str, Any]


class FrozenPhase:
    """Says when an optimizer's variance is frozen, and averages momenta from then on.

    Args:
        states: the optimizer's states by weight, with `step`, `exp_avg` and `exp_avg_sq`.
        freeze_step: number of updates before the freeze.
        group: the data-parallel ranks.

    Attributes:
        average: averages the momenta, and counts the bytes.
    """

    def __init__(self, states: Mapping[Tensor, State], *, freeze_step: int, group: Group) -> None:
        self.average = CompressedAverage(group)
        self._states = states
        self._freeze_step = freeze_step
        # The count on the host, and the state that it was read from: a checkpoint replaces the state.
        self._updates, self._counted_in = 0, None

    @property
    def is_next(self) -> bool:
        """Return True if the next update belongs to it."""
        steps = (state["step"] for state in self._states.values() if "step" in state)
        step = next(steps, None)
        if step is not self._counted_in:
            self._updates, self._counted_in = int(step or 0), step
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
            length = part_length(momentum.numel(), self.average.group.size)
            state["worker_error"] = torch.zeros_like(momentum)
            state["server_error"] = momentum.new_zeros(length)
        return Compressible(
            values=momentum,
            is_live=state["exp_avg_sq"] > 0,
            worker_error=state["worker_error"],
            server_error=state["server_error"],
        )
