"""Evaluate a checkpoint on tasks and texts, or on the data of its training."""

import logging

from neox_config import Resolved
from neox_config.derive.evaluation import evaluates_texts
from neox_config.errors import ConfigError
from neox_model.checkpoint.downloads import folder_with_weights
from neox_model.checkpoint.load import read_training_state
from neox_model.checkpoint.storage import find_storage
from neox_model.evaluate.perplexity import evaluate_parts
from neox_model.generate.run import load_forward
from neox_model.processes import join_processes, leave_processes, load_tokenizer
from neox_model.scoring.evaluation import TextEvaluation
from neox_model.train.data.position import Position

__all__ = ["evaluate_from"]

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
    config = resolved.config
    load = config.checkpoint.load
    if load is None:
        raise ConfigError("evaluation requires trained weights; set load to a folder with checkpoints")
    groups = join_processes(resolved)
    tokenizer = load_tokenizer(config)
    # Before the weights, so that an unknown task is reported at once.
    evaluation = TextEvaluation(resolved, tokenizer, groups)
    folder = folder_with_weights(
        load, groups, cache=config.checkpoint.store_cache, storage=find_storage(config, groups)
    )
    iteration = Position.from_state(read_training_state(folder, groups=groups)).iteration
    forward = load_forward(resolved, load, groups, tokenizer)
    logger.info(
        "evaluating on data-parallel %d x pipe-parallel %d x model-parallel %d",
        *(groups.data.size, groups.pipe.size, groups.model.size),
    )
    results = evaluation.run(lambda: forward, iteration=iteration)
    if results is not None:
        evaluation.write(results, checkpoint=load)
    leave_processes()
    return None if results is None else str(results)
