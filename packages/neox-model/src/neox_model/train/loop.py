"""The training loop: runs a step, then the callbacks."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

from neox_model.train.data.batch import Batch
from neox_model.train.run import Callback, Run
from neox_model.train.step import TrainStep

__all__ = ["Loop"]


class Loop:
    """Trains until `run.state.finished`. One pass of the loop is one optimizer update.

    Callbacks must end the loop on all ranks at the same iteration.

    Args:
        run: the run.
        batches: this rank's micro-batches, starting at the state's sample.
    """

    def __init__(self, run: Run, batches: Iterator[Batch]) -> None:
        self._run, self._batches = run, batches
        self._step: TrainStep = run.step
        for callback in run.callbacks:
            if type(callback).around_step is not Callback.around_step:
                self._step = partial(callback.around_step, self._step)
        self._has_started = False

    def run(self, iterations: int | None = None) -> None:
        """Train, at most this many iterations, and pause or end. Collective over all ranks.

        A later call continues a run that was paused.
        """
        run, state = self._run, self._run.state
        last = None if iterations is None else state.iteration + iterations
        self._begin()
        while not state.finished and state.iteration != last:
            report = self._step(self._batches)
            state.advance(report)
            for callback in run.callbacks:
                callback.on_step(report)
        if state.finished:
            for callback in run.callbacks:
                callback.on_end()
        self.pause()

    def pause(self) -> None:
        """Give back what callbacks changed in this process; for programs that continue without it."""
        with ExitStack() as stack:
            for callback in self._run.callbacks:
                stack.callback(callback.on_pause)

    def _begin(self) -> None:
        for callback in self._run.callbacks:
            (callback.on_resume if self._has_started else callback.on_start)()
        self._has_started = True
