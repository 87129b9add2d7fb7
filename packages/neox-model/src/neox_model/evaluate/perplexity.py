"""Compute the validation and test loss of a checkpoint, on the data of its training's next evaluation.

The weights are loaded directly into the model, in the configured precision. There is no optimizer, and every
rank holds its whole tensor-parallel part at any ZeRO stage.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from neox_config import NeoXConfig, Resolved
from neox_config.derive.adapters import base_of_adapters
from neox_config.errors import ConfigError
from neox_data.tokenizers import Tokenizer
from neox_model.assembly.choices import DTYPES
from neox_model.assembly.model import build_model
from neox_model.assembly.zero_sharding import gathered_parameter, without_zero
from neox_model.checkpoint.base import load_base
from neox_model.checkpoint.downloads import folder_with_weights
from neox_model.checkpoint.load import load_weights, read_training_state
from neox_model.checkpoint.storage import find_storage
from neox_model.engine.build import build_forward, prepare_engine
from neox_model.engine.contract import IsStopping
from neox_model.generate.run import explained_shortage
from neox_model.parallel.groups import Groups
from neox_model.processes import join_processes, leave_processes, load_tokenizer, recorded_values
from neox_model.train.accuracies import Accuracies, retrieval_accuracies
from neox_model.train.characters import character_count
from neox_model.train.data.batch import Batch, unweighted
from neox_model.train.data.datasets import check_tokenizers
from neox_model.train.data.objective import check_special_tokens, samples_of_objective
from neox_model.train.data.position import Position
from neox_model.train.data.streams import build_datasets, open_streams
from neox_model.train.engine_step import as_micro_batches
from neox_model.train.evaluate import PARTS, Evaluator

__all__ = ["evaluate_parts"]

logger = logging.getLogger(__name__)


def evaluate_parts(resolved: Resolved) -> str:
    """Return the validation and test loss of the latest checkpoint in `load`; call it on every rank.

    Returns:
        One line per part, with loss, perplexity and the iteration of the checkpoint.

    Raises:
        ConfigError: `load` or the data is not configured.
        CheckpointError: there is no checkpoint to load.
    """
    config = resolved.config
    load = config.checkpoint.load
    if load is None:
        raise ConfigError("evaluation requires trained weights; set load to a folder with checkpoints")
    groups = join_processes(resolved)
    storage = find_storage(config, groups)
    folder = folder_with_weights(load, groups, cache=config.checkpoint.store_cache, storage=storage)
    prepare_engine(resolved.run)
    tokenizer = load_tokenizer(config)
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
    losses, accuracies = _load_model(without_zero(resolved), folder, groups, tokenizer)
    evaluator = Evaluator(
        losses,
        streams,
        iterations=config.training.eval_iters,
        accumulation=resolved.derived.accumulation,
        samples_per_iteration=resolved.derived.train_batch_size,
        characters=character_count(config.generation, tokenizer, groups),
        accuracies=accuracies,
    )
    when = "" if state is None else f", after iteration {state['iteration']:,}"
    firsts = {"valid": position.validation_samples, "test": 0}
    with explained_shortage("set a smaller train-micro-batch-size-per-gpu"):
        found = {
            part: f"{evaluator.evaluate(part, first)}{when}"
            for part, first in firsts.items()
            if evaluator.has(part)
        }
    leave_processes()
    if not found:
        raise ConfigError(
            "there is no data to evaluate on: eval-iters is 0, or split leaves no validation and test "
            "documents; set eval-iters, split or valid-data-paths"
        )
    return "\n".join(f"{name} {found.get(part, _why_not(config, part))}" for part, name in PARTS.items())


def _why_not(config: NeoXConfig, part: str) -> str:
    if config.data.data_path is None:
        return f"not evaluated: {part}-data-paths is not set"
    return "not evaluated: split leaves no document for it"


@explained_shortage("use a device with more memory")
def _load_model(
    resolved: Resolved, folder: Path, groups: Groups, tokenizer: Tokenizer
) -> tuple[Callable[[Iterator[Batch], int, IsStopping], Tensor], Accuracies | None]:
    """Load the checkpoint's weights.

    Returns:
        The function that computes the mean loss of micro-batches, and what counts the accuracies of these.
    """
    model = build_model(resolved.model, resolved.run, groups, vocab_size=tokenizer.vocab_size)
    model.to(device=_device(), dtype=DTYPES[resolved.derived.precision])
    recorded = recorded_values(resolved, tokenizer)
    base = load_base(
        base_of_adapters(resolved.config),
        model,
        adapters=folder,
        groups=groups,
        config=recorded,
        writable=partial(gathered_parameter, groups=groups),
        cache=resolved.config.checkpoint.store_cache,
    )
    load_weights(
        folder,
        model=model,
        groups=groups,
        config=recorded | base,
        storage=find_storage(resolved.config, groups),
        evaluates=True,
    )
    engine = build_forward(resolved.run, model, groups=groups)

    def losses(batches: Iterator[Batch], count: int, is_stopping: IsStopping) -> Tensor:
        return engine.evaluate(as_micro_batches(unweighted(batches, count, _device())), count, is_stopping)

    return losses, retrieval_accuracies(model)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
