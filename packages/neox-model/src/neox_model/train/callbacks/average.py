"""Average the weights over the iterations of a training (EMA)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor

from neox_model.checkpoint.logical import engine_fragments
from neox_model.checkpoint.names import average_name
from neox_model.checkpoint.replica_states import shared_weight
from neox_model.engine.contract import Engine
from neox_model.parallel.logical import LogicalState, is_stage_copy
from neox_model.train.run import Callback, Run
from neox_model.train.state import StepReport

__all__ = ["WeightAverage"]


class WeightAverage(Callback):
    """Keeps an exponential moving average of each master weight, in its precision and where it is.

    An average begins with the weight that the training, or the first run that averages, starts from.

    Args:
        engine: has the weights.
        decay: factor of the average so far; the weights have 1 - decay.
        interval: iterations between two updates of the averages.
    """

    def __init__(self, engine: Engine, *, decay: float, interval: int = 1) -> None:
        self._engine, self._decay, self._interval = engine, decay, interval
        with engine.update.in_memory():
            self._states = [
                LogicalState(
                    name=average_name(fragment.name),
                    shape=fragment.logical.shape,
                    slices=fragment.logical.slices,
                    start=fragment.held.start,
                    values=torch.zeros_like(fragment.weight),
                    is_split_over_model=fragment.logical.model_parallel,
                    is_split_over_data=engine.update.splits_over_data,
                    is_expert=fragment.logical.is_expert,
                    is_stage_copy=is_stage_copy(fragment.held.param),
                    if_missing=fragment.name,
                )
                for fragment in engine_fragments(engine)
            ]

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if `ema_decay` is set."""
        section = run.config.optimizer
        if section.ema_decay is None:
            return None
        return cls(run.engine, decay=section.ema_decay, interval=section.ema_interval)

    def states(self) -> Sequence[LogicalState]:
        """Return the averages."""
        return self._states

    @torch.no_grad()
    def on_load(self) -> None:
        """Begin with the weights; averages of a checkpoint are loaded already."""
        if self.run.state.iteration == 0:
            for weight, average in self._pairs():
                average.copy_(weight)

    @torch.no_grad()
    def on_step(self, report: StepReport) -> None:
        """Take the weights into the averages if it is due."""
        if self.run.state.iteration % self._interval == 0:
            for weight, average in self._pairs():
                average.lerp_(weight, 1.0 - self._decay)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, the model computes with the averages. Collective over all ranks."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        update = self._engine.update
        with update.in_memory(changes=True):
            for weight, average in self._pairs():
                kept = weight.clone()
                weight.copy_(average)
                average.copy_(kept)
            update.to_model()

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's part of each weight, with that of its average."""
        update = self._engine.update
        with update.in_memory():
            for fragment, state in zip(engine_fragments(self._engine), self._states, strict=True):
                yield shared_weight(fragment, update.optimizer), state.values
