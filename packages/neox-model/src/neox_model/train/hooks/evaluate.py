"""Validate every `eval_interval` iterations, and validate and test when the training is complete."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from neox_model.metrics.events import NO_EVENTS, Events
from neox_model.metrics.timers import Timers
from neox_model.metrics.writers.base import MetricWriter
from neox_model.scoring.endings import StoppedError
from neox_model.train.evaluate import PARTS, Evaluator
from neox_model.train.hooks.base import Hook
from neox_model.train.hooks.stop import StopHook
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["EvaluateHook", "ReserveHook"]

logger = logging.getLogger(__name__)


class ReserveHook(Hook):
    """Reserves the samples of an evaluation that is due, before the save of its iteration.

    So the save comes before an evaluation that may take long, and holds that it is due. After the last
    iteration none is: `on_end` evaluates.

    Args:
        samples: number of samples of an evaluation.
        interval: iterations between validations; None: validate only at the end.
    """

    def __init__(self, samples: int, *, interval: int | None) -> None:
        self._samples, self._interval = samples, interval

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Reserve samples every `interval` iterations."""
        if self._interval and state.iteration % self._interval == 0:
            first = state.take_validation_samples(self._samples)
            state.due_validation = first if state.iteration < state.last_iteration else None


class EvaluateHook(Hook):
    """Evaluates, writes the losses and logs them, except those at the end, which are the training's result.

    An evaluation is due until it is complete. A stop request ends it between micro-batches, and a resumed
    training begins with it. Must follow the hook that saves.

    Args:
        evaluator: runs the evaluations.
        stop: has the stop requests.
        texts: evaluates on tasks and texts, after the validation; raises StoppedError.
        save_last: saves a state from which no further iteration follows, unless it is saved already.
        writers: receive the losses.
        timers: measures evaluation as the activity `evaluate`.
        before_evaluation: called first, so that training metrics are written before the evaluation's.
        while_evaluating: function of the name of the evaluation that returns a context manager around it.
        events: records each evaluation.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        *,
        stop: StopHook,
        texts: Callable[[TrainState], None] = lambda state: None,
        save_last: Callable[[TrainState], None] = lambda state: None,
        writers: Sequence[MetricWriter],
        timers: Timers,
        before_evaluation: Callable[[], None],
        while_evaluating: Callable[[str], AbstractContextManager[object]] = nullcontext,
        events: Events = NO_EVENTS,
    ) -> None:
        self._events = events
        self._evaluator, self._stop = evaluator, stop
        self._texts, self._save_last = texts, save_last
        self._writers = writers
        self._timers = timers
        self._before_evaluation = before_evaluation
        self._while_evaluating = while_evaluating

    def on_start(self, state: TrainState) -> None:
        """Evaluate if it was due when the checkpoint was saved."""
        if state.due_validation is None or state.finished:
            return
        if self._evaluator.has("valid"):
            # This run's number of samples may be another.
            state.validation_samples = state.due_validation
            state.take_validation_samples(self._evaluator.samples)
        self._evaluate_due(state)

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Evaluate if it is due, unless shutdown is urgent; save again if the training ends here."""
        if state.due_validation is None or state.is_hurried:
            return
        self._evaluate_due(state)
        if state.finished:
            self._save_last(state)

    def on_end(self, state: TrainState) -> None:
        """Validate, test, and evaluate on texts unless the training was stopped before its last iteration."""
        if state.stop_reason is not None:
            return
        with self._ended_by_stop(state):
            self._evaluate("valid", state.validation_samples, state)
            self._evaluate("test", 0, state)
            self._texts(state)

    def _evaluate_due(self, state: TrainState) -> None:
        assert state.due_validation is not None, "the caller has looked"
        with self._ended_by_stop(state):
            self._evaluate("valid", state.due_validation, state)
            if self._evaluator.has("valid"):
                found = self._evaluator.results["valid"]
                logger.info("iteration %d: %s %s", state.iteration, PARTS["valid"], found)
            self._texts(state)
            state.due_validation = None

    @contextmanager
    def _ended_by_stop(self, state: TrainState) -> Iterator[None]:
        try:
            yield
        except StoppedError:
            self._stop.end_evaluation(state)

    def _evaluate(self, part: str, first: int, state: TrainState) -> None:
        name = PARTS[part]
        if not self._evaluator.has(part):
            return
        self._before_evaluation()
        began = time.monotonic()
        with self._timers.measure("evaluate"), self._while_evaluating(name):
            evaluation = self._evaluator.evaluate(part, first, self._stop.is_stopping)
        for writer in self._writers:
            writer.write(evaluation.metrics(name), state.iteration)
            writer.flush()
        self._events.record(
            "evaluation",
            state.iteration,
            part=part,
            loss=evaluation.loss,
            perplexity=evaluation.perplexity,
            seconds=round(time.monotonic() - began, 3),
        )
