"""Evaluate on tasks and texts, after the validation."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from neox_model.generate.forward import Forward
from neox_model.metrics.timers import Timers
from neox_model.metrics.writers.base import MetricWriter
from neox_model.scoring.endings import NotFiniteError
from neox_model.scoring.evaluation import TextEvaluation
from neox_model.train.state import TrainState

__all__ = ["EvaluateTexts"]

logger = logging.getLogger(__name__)


class EvaluateTexts:
    """Evaluates the weights of the moment, and writes and logs the results.

    Args:
        evaluation: what is evaluated.
        forward: returns the forward pass of a copy of the model.
        writes_files: write a file of each evaluation.
        writers: receive the results as metrics.
        timers: measures the evaluation as the activity `evaluate`.
        before_evaluation: called first, so that training metrics are written before the evaluation's.
        is_stopping: returns whether a signal has requested the end of the training on this rank.
        while_evaluating: function of the name of the evaluation that returns a context manager around it.
    """

    def __init__(
        self,
        evaluation: TextEvaluation,
        forward: Callable[[], Forward],
        *,
        writes_files: bool,
        writers: Sequence[MetricWriter],
        timers: Timers,
        before_evaluation: Callable[[], None],
        is_stopping: Callable[[], bool],
        while_evaluating: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._evaluation, self._forward = evaluation, forward
        self._writes_files = writes_files
        self._writers, self._timers = writers, timers
        self._before_evaluation, self._while_evaluating = before_evaluation, while_evaluating
        self._is_stopping = is_stopping

    def __call__(self, state: TrainState) -> None:
        """Evaluate. Collective over all ranks.

        Raises:
            StoppedError: a signal requested the end of the training.
        """
        self._before_evaluation()
        try:
            with self._timers.measure("evaluate"), self._while_evaluating("tasks and texts"):
                results = self._evaluation.run(
                    self._forward, iteration=state.iteration, is_stopping=self._is_stopping
                )
        except NotFiniteError as error:
            logger.warning("iteration %d: no results of tasks and texts: %s", state.iteration, error)
            return
        if results is None:
            return
        for writer in self._writers:
            writer.write(results.metrics(), state.iteration)
            writer.flush()
        if self._writes_files:
            self._evaluation.write(results, checkpoint=None)
        logger.info("iteration %d: evaluation in %.1f s\n%s", state.iteration, results.seconds, results)
