"""The training loop: runs a step, then a list of hooks."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from neox_model.train.data.batch import Batch
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import TrainStep

__all__ = ["Loop"]


class Loop:
    """Trains until `state.finished`. One pass of the loop is one optimizer update.

    Hooks must end the loop on all ranks at the same iteration.

    Args:
        state: counts iterations, samples and tokens.
        step: runs one iteration.
        batches: this rank's micro-batches, starting at the state's sample.
        hooks: called in this order at the start, after every iteration and at the end.
    """

    def __init__(
        self, state: TrainState, step: TrainStep, batches: Iterator[Batch], hooks: Sequence[Hook]
    ) -> None:
        self._state, self._step, self._batches, self._hooks = state, step, batches, hooks
        self._has_started = False

    def run(self, iterations: int | None = None) -> None:
        """Train, at most this many iterations, and pause or end. Collective over all ranks.

        A later call continues a training that was paused.
        """
        state = self._state
        last = None if iterations is None else state.iteration + iterations
        self._begin()
        while not state.finished and state.iteration != last:
            report = self._step(self._batches)
            state.advance(report)
            for hook in self._hooks:
                hook.on_step(state, report)
        if state.finished:
            for hook in self._hooks:
                hook.on_end(state)
        self.pause()

    def pause(self) -> None:
        """Give back what hooks changed in this process; for programs that continue without it."""
        with ExitStack() as stack:
            for hook in self._hooks:
                stack.callback(hook.on_pause, self._state)

    def _begin(self) -> None:
        for hook in self._hooks:
            if self._has_started:
                hook.on_resume(self._state)
            else:
                hook.on_start(self._state)
        self._has_started = True
