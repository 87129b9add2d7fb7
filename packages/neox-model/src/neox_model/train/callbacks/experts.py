"""The balance of experts: counts of their tokens over all ranks, once per update."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from neox_model.checkpoint.logical import copy_model_states
from neox_model.parallel.collectives import all_reduce
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import LogicalState, model_states
from neox_model.train.data.batch import Batch
from neox_model.train.run import Callback, Run
from neox_model.train.state import StepReport
from neox_model.train.step import TrainStep

__all__ = ["ExpertBalance"]


class ExpertBalance(Callback):
    """Moves the biases of experts after each update that is applied, and reports how even their shares are.

    Args:
        routers: those of this rank's layers (modules with `take_counts`); a pipeline stage may have none.
        groups: this job's process groups.
        rate: change of a bias at an update.
    """

    def __init__(self, routers: list[Any], groups: Groups, *, rate: float) -> None:
        self._routers, self._groups, self._rate = routers, groups, rate

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if the model has experts."""
        given = run.resolved.run.experts
        if given.moe_num_experts == 1:
            return None
        model: torch.nn.Module = run.engine.model
        routers = [module for module in model.modules() if hasattr(module, "take_counts")]
        # With adapters, what they are added to stays as it is.
        rate = given.moe_expert_bias_rate if run.resolved.model.adapters is None else 0.0
        return cls(routers, run.groups, rate=rate)

    def states(self) -> list[LogicalState]:
        """Return the biases."""
        return model_states(self.run.engine.model)

    def on_load(self) -> None:
        """Start counting at 0, without passes before the first update, such as trials of compiled layers."""
        for router in self._routers:
            router.take_counts()

    def on_copy(self, model: torch.nn.Module) -> None:
        """Give a copy of the model the biases. Collective."""
        copy_model_states(self.states(), model, self._groups)

    def around_step(self, step: TrainStep, batches: Iterator[Batch]) -> StepReport:
        """Count the tokens of experts over all ranks after the step. Collective."""
        report = step(batches)
        # Sums of load and entropy, and the number of layers.
        sums = torch.zeros(3, device=self.run.engine.device)
        if self._routers:
            counts_LE = all_reduce(
                torch.stack([router.take_counts() for router in self._routers]), self._groups.data
            )
            rate = self._rate * (1.0 - torch.as_tensor(report.skipped, dtype=torch.float32))
            for router, counts_E in zip(self._routers, counts_LE, strict=True):
                router.move_bias(counts_E, rate.to(counts_E.device))
            sums = _evenness(counts_LE)
        load, entropy, layers = all_reduce(sums, self._groups.pipe).unbind()
        return replace(report, expert_load=load / layers, expert_entropy=entropy / layers)


def _evenness(counts_LE: Tensor) -> Tensor:
    """Return the sums over layers of load and entropy, and the number of layers."""
    shares_LE = counts_LE.float() / counts_LE.sum(dim=1, keepdim=True)
    layers, number = shares_LE.shape
    load = (number * shares_LE.amax(dim=1)).sum()
    entropy = torch.special.entr(shares_LE).sum() / torch.tensor(float(number)).log()
    return torch.stack([load, entropy, torch.full_like(load, layers)])
