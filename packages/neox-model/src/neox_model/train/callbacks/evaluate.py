"""Evaluate every `eval_interval` iterations and when the run is complete: losses, tasks and texts."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Self

from neox_model.scoring.endings import NotFiniteError, StoppedError
from neox_model.train.callbacks.average import WeightAverage
from neox_model.train.callbacks.checkpoint import CheckpointCallback
from neox_model.train.callbacks.stop import StopCallback
from neox_model.train.copied_model import copied_forward
from neox_model.train.evaluate import AVERAGED, EVALUATIONS
from neox_model.train.run import Callback, Run
from neox_model.train.state import StepReport

__all__ = ["EvaluateCallback", "ReserveCallback"]

logger = logging.getLogger(__name__)


class ReserveCallback(Callback):
    """Reserves the samples of an evaluation that is due, before the save of its iteration.

    So the save comes before an evaluation that may take long, and holds that it is due. After the last
    iteration none is: `on_end` evaluates.

    Args:
        interval: iterations between validations; None: validate only at the end.
    """

    def __init__(self, interval: int | None) -> None:
        self._interval = interval

    @classmethod
    def from_run(cls, run: Run) -> Self:
        """Build it."""
        return cls(run.config.training.eval_interval)

    def on_step(self, report: StepReport) -> None:
        """Reserve samples every `interval` iterations."""
        state = self.run.state
        if self._interval and state.iteration % self._interval == 0:
            first = state.take_validation_samples(self.run.evaluator.samples)
            state.due_validation = first if state.iteration < state.last_iteration else None


class EvaluateCallback(Callback):
    """Evaluates, writes the losses and logs them, except those at the end, which are the run's result.

    An evaluation is due until it is complete. A stop request ends it between micro-batches, and a resumed
    run begins with it. Must follow the callback that saves: tasks and texts may fail.

    Args:
        stop: has the stop requests.
        checkpoint: saves a state from which no further iteration follows; None: nothing is saved.
        average: has averages of the weights, which are evaluated on the same samples; None: there are none.
    """

    def __init__(
        self,
        stop: StopCallback,
        checkpoint: CheckpointCallback | None = None,
        average: WeightAverage | None = None,
    ) -> None:
        self._stop, self._checkpoint, self._average = stop, checkpoint, average

    @classmethod
    def from_run(cls, run: Run) -> Self:
        """Build it; the callbacks that stop, save and average are built before it."""
        stop = run.callback(StopCallback)
        assert stop is not None, "every run can be stopped"
        return cls(stop, run.callback(CheckpointCallback), run.callback(WeightAverage))

    def on_start(self) -> None:
        """Evaluate if it was due when the checkpoint was saved."""
        state = self.run.state
        if state.due_validation is None or state.finished:
            return
        if self.run.evaluator.has("valid"):
            # This run's number of samples may be another.
            state.validation_samples = state.due_validation
            state.take_validation_samples(self.run.evaluator.samples)
        self._evaluate_due()

    def on_step(self, report: StepReport) -> None:
        """Evaluate if it is due, unless shutdown is urgent; save again if the run ends here."""
        if self.run.state.due_validation is None or self.run.state.is_hurried:
            return
        self._evaluate_due()
        if self.run.state.finished and self._checkpoint is not None:
            self._checkpoint.save_last()

    def on_end(self) -> None:
        """Validate, test, and evaluate on texts unless the run was stopped before its last iteration."""
        if self.run.state.stop_reason is not None:
            return
        with self._ended_by_stop():
            self._evaluate("valid", self.run.state.validation_samples)
            self._evaluate("test", 0)
            self._evaluate_texts()

    def _evaluate_due(self) -> None:
        state = self.run.state
        assert state.due_validation is not None, "the caller has looked"
        with self._ended_by_stop():
            self._evaluate("valid", state.due_validation)
            if self.run.evaluator.has("valid"):
                results = self.run.evaluator.results
                for part in (each for each in ("valid", f"valid{AVERAGED}") if each in results):
                    logger.info("iteration %d: %s %s", state.iteration, EVALUATIONS[part], results[part])
            self._evaluate_texts()
            state.due_validation = None

    @contextmanager
    def _ended_by_stop(self) -> Iterator[None]:
        try:
            yield
        except StoppedError:
            self._stop.end_evaluation(self.run.state)

    def _evaluate(self, part: str, first: int) -> None:
        if not self.run.evaluator.has(part):
            return
        self._evaluate_weights(part, first)
        if self._average is not None:
            with self._average.in_use():
                self._evaluate_weights(part, first, AVERAGED)

    def _evaluate_weights(self, part: str, first: int, end: str = "") -> None:
        iteration, name = self.run.state.iteration, EVALUATIONS[part + end]
        with _evaluating(self.run, name):
            began = time.monotonic()
            evaluation = self.run.evaluator.evaluate(part, first, self._stop.is_stopping, end=end)
        self.run.metrics.write(evaluation.metrics(name), iteration)
        if part == "valid" and not end:
            self.run.progress.describe(metrics={f"loss/{name}": evaluation.loss})
        self.run.events.record(
            "evaluation",
            iteration,
            part=part + end,
            loss=evaluation.loss,
            perplexity=evaluation.perplexity,
            seconds=round(time.monotonic() - began, 3),
        )

    def _evaluate_texts(self) -> None:
        """Evaluate the weights of the moment on tasks and texts, and write and log the results. Collective.

        Raises:
            StoppedError: a signal requested the end of the run.
        """
        texts, iteration = self.run.texts, self.run.state.iteration
        if texts is None:
            return
        try:
            with _evaluating(self.run, "tasks and texts"):
                results = texts.run(
                    partial(copied_forward, self.run),
                    iteration=iteration,
                    is_stopping=lambda: self._stop.is_requested,
                )
        except NotFiniteError as error:
            logger.warning("iteration %d: no results of tasks and texts: %s", iteration, error)
            return
        if results is None:
            return
        self.run.metrics.write(results.metrics(), iteration)
        if self.run.config.generation.eval_results_prefix:
            texts.write(results, checkpoint=None)
        logger.info("iteration %d: evaluation in %.1f s\n%s", iteration, results.seconds, results)


@contextmanager
def _evaluating(run: Run, name: str) -> Iterator[None]:
    run.metrics.write_pending()
    phase = run.progress.phase(f"evaluating ({name})", iteration=run.state.iteration)
    with run.timers.measure("evaluate"), phase:
        yield
