"""The training loop: runs a step, then a list of hooks."""

from collections.abc import Iterator, Sequence

from neox_model.train.data.batch import Batch
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import TrainStep

__all__ = ["train"]


def train(state: TrainState, step: TrainStep, batches: Iterator[Batch], hooks: Sequence[Hook]) -> None:
    """Train until `state.finished`. One pass of the loop is one optimizer update.

    Collective over all ranks: hooks must end the loop on all ranks at the same iteration.

    Args:
        state: counts iterations, samples and tokens.
        step: runs one iteration.
        batches: this rank's micro-batches, starting at the state's sample.
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
