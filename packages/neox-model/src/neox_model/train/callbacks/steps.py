"""Callbacks around a step: for varying lengths, for batches left out, and for a term of the loss."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Self

import torch
from torch import Tensor

from neox_config.extras.data_efficiency.curricula import length_schedule
from neox_model.engine.mean_loss import mean_over
from neox_model.parallel.collectives import all_reduce
from neox_model.parallel.groups import Groups
from neox_model.train.data.batch import Batch
from neox_model.train.run import Callback, Run
from neox_model.train.state import StepReport
from neox_model.train.step import TrainStep

__all__ = ["LeftOutBatches", "VaryingLengths", "ZLoss"]


class VaryingLengths(Callback):
    """Lets the sequence length change between iterations, and reports the actual number of tokens.

    Args:
        tokens: function of the number of finished iterations that returns the tokens of the next one, over
            all replicas.
    """

    def __init__(self, tokens: Callable[[int], int]) -> None:
        self._tokens = tokens

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if a curriculum changes the length."""
        schedule = length_schedule(run.resolved.data.efficiency, run.difficulties)
        if schedule is None:
            return None
        samples = run.resolved.run.batch.whole
        return cls(lambda iteration: samples * schedule(iteration))

    def around_step(self, step: TrainStep, batches: Iterator[Batch]) -> StepReport:
        """Discard the shapes of the last step, and count the tokens of this one."""
        self.run.engine.forget_shapes()
        return replace(step(batches), tokens=self._tokens(self.run.state.iteration))


class ZLoss(Callback):
    """Reports the mean of the term of `z_loss`, which the loss of a step does not contain.

    Args:
        terms: the term of each micro-batch, on pipeline stages with a head (`LMLoss.z_terms`).
        groups: this job's process groups.
    """

    def __init__(self, terms: list[Tensor], groups: Groups) -> None:
        self._terms, self._groups = terms, groups

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if the loss has the term."""
        return cls(run.engine.model.z_terms, run.groups) if run.resolved.run.targets.z_loss else None  # type: ignore[arg-type]

    def around_step(self, step: TrainStep, batches: Iterator[Batch]) -> StepReport:
        """Add up the terms of the step. Collective over all ranks."""
        self._terms.clear()
        report = step(batches)
        total = torch.zeros((), device=self.run.engine.device)
        for term in self._terms:
            total += term
        mean = mean_over(self._groups.data, total / self.run.step.accumulation)
        return replace(report, z_loss=all_reduce(mean, self._groups.pipe))


class LeftOutBatches(Callback):
    """Reads the micro-batches of an iteration that is left out, and computes nothing.

    The samples keep their place in the order of all samples, so iterations read the same ones as without it.
    """

    @classmethod
    def from_run(cls, run: Run) -> Self:
        """Build it."""
        return cls()

    def around_step(self, step: TrainStep, batches: Iterator[Batch]) -> StepReport:
        """Train on the next micro-batches, or only read them."""
        if not self.run.state.leaves_out_next:
            return step(batches)
        for _ in islice(batches, self.run.step.accumulation):
            pass
        return StepReport(loss=None, grad_norm=None, skipped=True, tokens=0)
