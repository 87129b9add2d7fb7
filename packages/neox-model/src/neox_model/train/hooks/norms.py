"""Write the 2-norm of every parameter and every optimizer state once per interval."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, distributed

from neox_model.checkpoint.logical import engine_fragments, is_written_here, optimizer_parts
from neox_model.checkpoint.outcome import gather
from neox_model.checkpoint.replica_states import shared_weight
from neox_model.engine.contract import Engine
from neox_model.metrics.writers.base import MetricWriter
from neox_model.parallel.groups import Groups
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["NormsHook", "tensor_norms"]


class NormsHook(Hook):
    """Writes `param_norms/NAME` and `optimizer_state_norms/NAME/STATE` of whole tensors, by logical name.

    Args:
        measure: computes the norms; collective over all ranks.
        writers: receive the norms; empty on all ranks except one.
        interval: iterations between two writes.
        before_writing: called first, so that metrics are written in order.
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


def tensor_norms(engine: Engine, groups: Groups, *, parameters: bool, states: bool) -> dict[str, float]:
    """Return the 2-norms of whole logical tensors, the same on every rank and in every layout. Collective.

    Args:
        engine: the engine; the norms are those of its master weights.
        groups: this rank's process groups.
        parameters: include every weight, as `param_norms/NAME`.
        states: include every optimizer state with a value per weight, as `optimizer_state_norms/NAME/STATE`.
    """
    squares: dict[str, float] = {}
    with engine.update.in_memory():
        for name, values in _pieces(engine, groups, parameters=parameters, states=states):
            square = torch.linalg.vector_norm(values, dtype=torch.float32).square().item()
            squares[name] = squares.get(name, 0.0) + square
    names = sorted({name for held in gather(groups.control, list(squares)) for name in held})
    totals = torch.tensor([squares.get(name, 0.0) for name in names], dtype=torch.float64)
    if groups.control.size > 1:
        distributed.all_reduce(totals, group=groups.control.process_group)
    return dict(zip(names, totals.sqrt().tolist(), strict=True))


def _pieces(
    engine: Engine, groups: Groups, *, parameters: bool, states: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's pieces; every element of the model is in exactly one piece of one rank."""
    for fragment in engine_fragments(engine):
        if not is_written_here(fragment, groups, splits_over_data=engine.update.splits_over_data):
            continue
        if parameters:
            yield f"param_norms/{fragment.name}", shared_weight(fragment, engine.update.optimizer)
        for part in optimizer_parts(fragment, engine.update.optimizer)[0] if states else ():
            yield f"optimizer_state_norms/{part.name}", part.values
