"""Evaluate a checkpoint on tasks and texts, or on the data of its training."""

import logging
import time

from neox_config import Resolved
from neox_config.derive.evaluation import evaluates_texts
from neox_config.errors import ConfigError
from neox_model.errors import StopRequested
from neox_model.evaluate.perplexity import evaluate_parts
from neox_model.generate.interruption import ending_on_signals
from neox_model.generate.run import load_forward, on_several
from neox_model.parallel.groups import Groups
from neox_model.processes import join_processes, leave_processes, load_tokenizer
from neox_model.scoring.evaluation import TextEvaluation
from neox_model.scoring.results import Results

__all__ = ["evaluate_from", "evaluate_texts_in"]

logger = logging.getLogger(__name__)


def evaluate_from(resolved: Resolved) -> str | None:
    """Evaluate the latest checkpoint in `load` as one rank; call it on every rank.

    Tasks (`eval_tasks`) and texts (`eval_data`) are evaluated if they are configured, otherwise the
    validation and test data.

    Returns:
        The results as text, on rank 0.

    Raises:
        ConfigError: `load` is not configured, or there is nothing to evaluate on.
        NeoXError: there is no checkpoint, or the evaluation failed.
    """
    return _evaluate_texts(resolved) if evaluates_texts(resolved.config) else evaluate_parts(resolved)


def _evaluate_texts(resolved: Resolved) -> str | None:
    load = resolved.config.checkpoint.load
    if load is None:
        raise ConfigError("evaluation requires trained weights; set load to a folder with checkpoints")
    groups = join_processes(resolved)
    began = time.monotonic()
    try:
        results = evaluate_texts_in(groups, resolved, load)
    except StopRequested as stop:
        minutes = (time.monotonic() - began) / 60
        raise StopRequested(
            f"{stop}: the evaluation was stopped after {minutes:.1f} minutes, and has no results",
            exit_code=stop.exit_code,
        ) from None
    leave_processes()
    return None if results is None else str(results)


def evaluate_texts_in(groups: Groups, resolved: Resolved, load: str) -> Results | None:
    """Evaluate on tasks and texts, and write the file of the results. Collective over all ranks.

    Args:
        groups: this job's process groups.
        resolved: the configuration.
        load: the folder of the checkpoints.

    Returns:
        The results, on rank 0.

    Raises:
        StopRequested: SIGTERM or SIGINT was received.
    """
    tokenizer = load_tokenizer(resolved.config)
    # A separate block: the harness ignores errors while it reads its tasks, and so the one of a signal.
    with ending_on_signals():
        # Before the weights, so that an unknown task is reported at once.
        evaluation = TextEvaluation(resolved, tokenizer, groups)
    with ending_on_signals():
        forward, iteration = load_forward(resolved, load, groups, tokenizer)
        logger.info("evaluating%s", on_several(groups))
        results = evaluation.run(lambda: forward, iteration=iteration)
        if results is not None:
            evaluation.write(results, checkpoint=load)
    return results
