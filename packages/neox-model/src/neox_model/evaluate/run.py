"""Evaluate a checkpoint on tasks and texts, or on the data of its training."""

import logging

from neox_config import Resolved
from neox_config.derive.evaluation import evaluates_texts
from neox_config.spec.resume import flat_values
from neox_model.evaluate.perplexity import evaluate_parts
from neox_model.generate.interruption import ending_on_signals
from neox_model.generate.run import load_forward
from neox_model.parallel.groups import Groups
from neox_model.processes import load_tokenizer
from neox_model.scoring.evaluation import TextEvaluation
from neox_model.scoring.results import Results

__all__ = ["evaluate_in"]

logger = logging.getLogger(__name__)


def evaluate_in(groups: Groups, resolved: Resolved) -> "str | Results | None":
    """Evaluate the latest checkpoint in `load`. Collective over all ranks.

    Tasks (`eval_tasks`) and texts (`eval_data`) are evaluated if they are configured, otherwise the
    validation and test data.

    Returns:
        The results; those of tasks and texts on rank 0.

    Raises:
        ConfigError: there is nothing to evaluate on.
        NeoXError: there is no checkpoint, or the evaluation failed.
        StopRequested: SIGTERM or SIGINT was received.
    """
    config, load = resolved.config, resolved.config.checkpoint.load
    assert load is not None, "preflight requires it"
    if not evaluates_texts(config):
        return evaluate_parts(groups, resolved, load)
    tokenizer = load_tokenizer(config.tokenizer)
    # A separate block: the harness ignores errors while it reads its tasks, and so the one of a signal.
    with ending_on_signals():
        # Before the weights, so that an unknown task is reported at once.
        evaluation = TextEvaluation(
            config.generation,
            resolved.run.batch,
            tokenizer,
            groups,
            seed=config.training.seed,
            configuration=flat_values(config),
        )
    with ending_on_signals():
        forward, iteration = load_forward(resolved, load, groups, tokenizer)
        logger.info("evaluating")
        results = evaluation.run(lambda: forward, iteration=iteration)
        if results is not None:
            evaluation.write(results, checkpoint=load)
    return results
