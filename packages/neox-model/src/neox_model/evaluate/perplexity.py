"""Compute the validation and test loss of a checkpoint, on the data of its training's next evaluation.

The weights are loaded directly into the model, in the configured precision. There is no optimizer, and every
rank holds its whole tensor-parallel part at any ZeRO stage.
"""

import logging
from collections.abc import Iterator

from torch import Tensor

from neox_config import Resolved
from neox_config.derive.adapters import base_of_adapters
from neox_config.errors import ConfigError
from neox_config.spec.resume import recorded_values
from neox_model.assembly.choices import DTYPES, computing_device
from neox_model.assembly.model import build_model
from neox_model.assembly.zero_sharding import without_zero
from neox_model.checkpoint.downloads import folder_with_weights
from neox_model.checkpoint.load import load_weights, read_training_state
from neox_model.checkpoint.storage import find_storage
from neox_model.engine.build import build_forward, prepare_engine
from neox_model.engine.contract import IsStopping
from neox_model.generate.run import explained_shortage
from neox_model.parallel.groups import Groups
from neox_model.processes import load_tokenizer
from neox_model.train.data.batch import Batch, unweighted
from neox_model.train.data.datasets import check_tokenizers
from neox_model.train.data.objective import check_special_tokens, samples_of_objective
from neox_model.train.data.position import Position
from neox_model.train.data.streams import build_datasets, open_streams
from neox_model.train.evaluate import PARTS, Evaluator, character_count, retrieval_loss
from neox_model.train.step import as_micro_batches

__all__ = ["evaluate_parts"]

logger = logging.getLogger(__name__)


def evaluate_parts(groups: Groups, resolved: Resolved, load: str) -> str:
    """Return the validation and test loss of the latest checkpoint. Collective over all ranks.

    Args:
        groups: this job's process groups.
        resolved: the configuration.
        load: the folder of the checkpoints.

    Returns:
        One line per part, with loss, perplexity and the iteration of the checkpoint.

    Raises:
        ConfigError: the data is not configured.
        CheckpointError: there is no checkpoint to load.
    """
    config = resolved.config
    storage = find_storage(config.checkpoint, groups)
    section = config.checkpoint
    folder = folder_with_weights(
        load, groups, cache=section.store_cache, storage=storage, averages=section.load_ema
    )
    prepare_engine(resolved.run)
    tokenizer = load_tokenizer(config.tokenizer)
    entries = resolved.model.embedding.entries(tokenizer.vocab_size)
    check_tokenizers(resolved.data, tokenizer, entries=entries)
    check_special_tokens(resolved.data, tokenizer)
    state = read_training_state(folder, groups=groups)
    position = Position.from_state(state)
    datasets = build_datasets(resolved, ("valid", "test"), position=position)
    streams = open_streams(
        resolved.data,
        resolved.run,
        samples_of_objective(datasets, resolved.data, tokenizer),
        groups,
        vocab_size=entries,
        end_of_document=tokenizer.end_of_document,
    )
    with explained_shortage("use a device with more memory"):
        model = build_model(
            resolved.model, without_zero(resolved.run), groups, vocab_size=tokenizer.vocab_size
        )
        model.to(device=computing_device(), dtype=DTYPES[resolved.run.precision.weights])
        load_weights(
            folder,
            model=model,
            groups=groups,
            config=recorded_values(
                resolved, fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size
            ),
            base=base_of_adapters(config),
            cache=section.store_cache,
            storage=storage,
            averages=section.load_ema,
        )
    engine = build_forward(resolved.run, model, groups=groups)

    def losses(batches: Iterator[Batch], count: int, is_stopping: IsStopping) -> Tensor:
        found = unweighted(batches, count, computing_device())
        return engine.evaluate(as_micro_batches(found), count, is_stopping)

    evaluator = Evaluator(
        losses,
        streams,
        iterations=config.training.eval_iters,
        accumulation=resolved.run.batch.accumulation,
        samples_per_iteration=resolved.run.batch.whole,
        characters=character_count(config.generation, tokenizer, groups),
        retrieval=retrieval_loss(model),
    )
    when = "" if state is None else f", after iteration {state['iteration']:,}"
    firsts = {"valid": position.validation_samples, "test": 0}
    with explained_shortage("set a smaller train-micro-batch-size-per-gpu"):
        found = {
            part: f"{evaluator.evaluate(part, first)}{when}"
            for part, first in firsts.items()
            if evaluator.has(part)
        }
    if not found:
        raise ConfigError(
            "there is no data to evaluate on: eval-iters is 0, or split leaves no validation and test "
            "documents; set eval-iters, split or valid-data-paths"
        )
    is_split = config.data.data_path is not None
    reason = "split leaves no document for it" if is_split else "{}-data-paths is not set"
    left_out = {part: f"not evaluated: {reason.format(part)}" for part in PARTS}
    return "\n".join(f"{name} {found.get(part, left_out[part])}" for part, name in PARTS.items())
