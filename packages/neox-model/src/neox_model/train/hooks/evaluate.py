"""Evaluate every `eval_interval` iterations and when the training is complete: losses, tasks and texts."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from neox_model.generate.forward import Forward
from neox_model.metrics.events import NO_EVENTS, Events
from neox_model.scoring.endings import NotFiniteError, StoppedError
from neox_model.scoring.evaluation import TextEvaluation
from neox_model.train.evaluate import PARTS, Evaluator
from neox_model.train.hooks.base import Hook, Write
from neox_model.train.hooks.stop import StopHook
from neox_model.train.state import StepReport, TrainState

__all__ = ["EvaluateHook", "ReserveHook", "evaluate_texts"]

logger = logging.getLogger(__name__)

Evaluating = Callable[[str], AbstractContextManager[object]]
"""Returns a context manager around the evaluation of this name."""


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


def evaluate_texts(
    evaluation: TextEvaluation,
    forward: Callable[[], Forward],
    state: TrainState,
    *,
    writes_files: bool,
    write: Write,
    is_stopping: Callable[[], bool],
    evaluating: Evaluating,
) -> None:
    """Evaluate the weights of the moment on tasks and texts, and write and log the results. Collective.

    Args:
        evaluation: what is evaluated.
        forward: returns the forward pass of a copy of the model.
        state: counts the iterations.
        writes_files: write a file of each evaluation.
        write: receives the results as metrics.
        is_stopping: returns whether a signal has requested the end of the training on this rank.
        evaluating: context of the evaluation.

    Raises:
        StoppedError: a signal requested the end of the training.
    """
    try:
        with evaluating("tasks and texts"):
            results = evaluation.run(forward, iteration=state.iteration, is_stopping=is_stopping)
    except NotFiniteError as error:
        logger.warning("iteration %d: no results of tasks and texts: %s", state.iteration, error)
        return
    if results is None:
        return
    write(results.metrics(), state.iteration)
    if writes_files:
        evaluation.write(results, checkpoint=None)
    logger.info("iteration %d: evaluation in %.1f s\n%s", state.iteration, results.seconds, results)


class EvaluateHook(Hook):
    """Evaluates, writes the losses and logs them, except those at the end, which are the training's result.

    An evaluation is due until it is complete. A stop request ends it between micro-batches, and a resumed
    training begins with it. Must follow the hook that saves.

    Args:
        evaluator: runs the evaluations.
        stop: has the stop requests.
        texts: evaluates on tasks and texts, after the validation; raises StoppedError.
        save_last: saves a state from which no further iteration follows, unless it is saved already.
        write: receives the losses.
        evaluating: context of each evaluation.
        events: records each evaluation.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        *,
        stop: StopHook,
        texts: Callable[[TrainState], None] = lambda state: None,
        save_last: Callable[[TrainState], None] = lambda state: None,
        write: Write,
        evaluating: Evaluating = nullcontext,
        events: Events = NO_EVENTS,
    ) -> None:
        self._events = events
        self._evaluator, self._stop = evaluator, stop
        self._texts, self._save_last = texts, save_last
        self._write = write
        self._evaluating = evaluating

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
        if not self._evaluator.has(part):
            return
        with self._evaluating(PARTS[part]):
            began = time.monotonic()
            evaluation = self._evaluator.evaluate(part, first, self._stop.is_stopping)
        self._write(evaluation.metrics(PARTS[part]), state.iteration)
        self._events.record(
            "evaluation",
            state.iteration,
            part=part,
            loss=evaluation.loss,
            perplexity=evaluation.perplexity,
            seconds=round(time.monotonic() - began, 3),
        )
