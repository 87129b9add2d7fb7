"""Validate every `eval_interval` iterations, and validate and test when the training is complete."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from neox_model.metrics.events import NO_EVENTS, Events
from neox_model.metrics.timers import Timers
from neox_model.metrics.writers.base import MetricWriter
from neox_model.train.evaluate import PARTS, Evaluator
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["EvaluateHook", "ReserveHook"]

logger = logging.getLogger(__name__)


class ReserveHook(Hook):
    """Reserves the samples of an evaluation that is due, before the save of its iteration.

    So the save comes before an evaluation that may take long, and a resumed training reads the next
    samples.

    Args:
        samples: number of samples of an evaluation.
        interval: iterations between validations; None: validate only at the end.
    """

    def __init__(self, samples: int, *, interval: int | None) -> None:
        self._samples, self._interval = samples, interval

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Reserve samples every `interval` iterations."""
        if self._interval and state.iteration % self._interval == 0:
            state.due_validation = state.take_validation_samples(self._samples)


class EvaluateHook(Hook):
    """Evaluates, writes the losses and logs them, except those at the end, which are the training's result.

    Args:
        evaluator: runs the evaluations.
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
        writers: Sequence[MetricWriter],
        timers: Timers,
        before_evaluation: Callable[[], None],
        while_evaluating: Callable[[str], AbstractContextManager[object]] = nullcontext,
        events: Events = NO_EVENTS,
    ) -> None:
        self._events = events
        self._evaluator = evaluator
        self._writers = writers
        self._timers = timers
        self._before_evaluation = before_evaluation
        self._while_evaluating = while_evaluating

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Validate if it is due, unless `on_end` follows or shutdown is urgent."""
        first, state.due_validation = state.due_validation, None
        if first is None or state.iteration >= state.last_iteration or state.is_hurried:
            return
        self._evaluate("valid", first, state)
        if self._evaluator.has("valid"):
            found = self._evaluator.results["valid"]
            logger.info("iteration %d: %s %s", state.iteration, PARTS["valid"], found)

    def on_end(self, state: TrainState) -> None:
        """Validate and test unless the training was stopped before its last iteration."""
        if state.stop_reason is None:
            self._evaluate("valid", state.validation_samples, state)
            self._evaluate("test", 0, state)

    def _evaluate(self, part: str, first: int, state: TrainState) -> None:
        name = PARTS[part]
        if not self._evaluator.has(part):
            return
        self._before_evaluation()
        began = time.monotonic()
        with self._timers.measure("evaluate"), self._while_evaluating(name):
            evaluation = self._evaluator.evaluate(part, first)
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
