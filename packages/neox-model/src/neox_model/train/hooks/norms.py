"""Writes the 2-norms of every parameter and of every optimizer state, once per interval."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from neox_model.checkpoint.engines import adapter_of, inner_optimizer
from neox_model.checkpoint.logical import engine_fragments, is_written_here, optimizer_parts
from neox_model.checkpoint.outcome import gather
from neox_model.metrics.writers import MetricWriter
from neox_model.parallel.groups import Groups
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["NormsHook", "tensor_norms"]


class NormsHook(Hook):
    """Writes `param_norms/NAME` and `optimizer_state_norms/NAME/STATE` of whole tensors, by logical name.

    Args:
        measure: makes the norms; collective over all ranks.
        writers: where numbers go; none on all ranks but one.
        interval: iterations between two writings.
        before_writing: called first, so that the record stays in order.
    """

    def __init__(
        self,
        measure: Callable[[], dict[str, float]],
        *,
        writers: Sequence[MetricWriter],
        interval: int,
        before_writing: Callable[[], None],
    ) -> None:
        self._measure = measure
        self._writers = writers
        self._interval = interval
        self._before_writing = before_writing

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Measure and write at the end of each interval."""
        if state.iteration % self._interval:
            return
        norms = self._measure()
        self._before_writing()
        for writer in self._writers:
            writer.write(norms, state.iteration)


def tensor_norms(
    model: nn.Module, engine: Any, groups: Groups, *, parameters: bool, states: bool
) -> dict[str, float]:
    """2-norms of whole logical tensors, however they are split: the same on every rank. Collective.

    Args:
        model: the module inside the engine.
        engine: DeepSpeed's, whose master weights count.
        groups: this rank's.
        parameters: of every weight, as `param_norms/NAME`.
        states: of every optimizer state with a value per weight, as `optimizer_state_norms/NAME/STATE`.
    """
    squares: dict[str, float] = {}
    for name, values in _pieces(model, engine, groups, parameters=parameters, states=states):
        square = torch.linalg.vector_norm(values, dtype=torch.float32).square().item()
        squares[name] = squares.get(name, 0.0) + square
    names = sorted({name for held in gather(groups.control, list(squares)) for name in held})
    totals = torch.tensor([squares.get(name, 0.0) for name in names], dtype=torch.float64)
    if groups.control.size > 1:
        distributed.all_reduce(totals, group=groups.control.process_group)
    return dict(zip(names, totals.sqrt().tolist(), strict=True))


def _pieces(
    model: nn.Module, engine: Any, groups: Groups, *, parameters: bool, states: bool
) -> Iterator[tuple[str, Tensor]]:
    """What this rank adds: every element of the model is in one piece of one rank."""
    optimizer, adapter = inner_optimizer(engine.optimizer), adapter_of(engine.optimizer)
    for fragment in engine_fragments(model, engine):
        if not is_written_here(fragment, groups, splits_over_data=adapter.splits_over_data):
            continue
        if parameters:
            yield f"param_norms/{fragment.name}", fragment.weight
        for part in optimizer_parts(fragment, optimizer)[0] if states else ():
            yield f"optimizer_state_norms/{part.name}", part.values
