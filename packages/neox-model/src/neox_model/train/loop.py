"""The training loop: it knows a step and a list of hooks, nothing else."""

from collections.abc import Iterator, Sequence

from neox_model.train.batch import Batch
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import TrainStep

__all__ = ["train"]


def train(state: TrainState, step: TrainStep, batches: Iterator[Batch], hooks: Sequence[Hook]) -> None:
    """Train until the state says finished. One pass of the loop is one optimizer update.

    Collective over all ranks: hooks may end the loop only on all ranks at the same iteration.

    Args:
        state: iterations and what they used are counted here, and nowhere else.
        step: one iteration.
        batches: this rank's micro-batches, from the state's sample on.
        hooks: called in this order at the start, after every iteration and at the end.
    """
    for hook in hooks:
        hook.on_start(state)
    while not state.finished:
        report = step(batches)
        state.advance(report)
        for hook in hooks:
            hook.on_step(state, report)
    for hook in hooks:
        hook.on_end(state)
