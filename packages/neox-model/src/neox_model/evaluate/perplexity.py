"""Validation and test loss of a checkpoint, on the data that its training would evaluate on next.

The weights are read straight into the model, in the configured precision: there is no optimizer, and every
rank holds its whole tensor-parallel part whatever the ZeRO stage of the training.
"""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from neox_data.tokenizers import Tokenizer
from neox_launcher.config import Resolved
from neox_launcher.errors import ConfigError
from neox_model.build.choices import DTYPES
from neox_model.build.model import build_model, padded_vocab_size
from neox_model.build.zero_sharding import without_zero
from neox_model.checkpoint.load import load_weights, read_training_state
from neox_model.parallel.groups import Groups
from neox_model.processes import join_processes, leave_processes, load_tokenizer, recorded_values
from neox_model.train.batch import Batch
from neox_model.train.data import build_datasets, choose_weights, open_streams
from neox_model.train.datasets import check_tokenizers
from neox_model.train.engine import build_pipeline_forward, prepare_deepspeed
from neox_model.train.evaluate import Evaluator
from neox_model.train.pipeline_step import PipelineStep
from neox_model.train.position import Position
from neox_model.train.sequential_step import mean_loss

__all__ = ["evaluate_from"]

logger = logging.getLogger(__name__)


def evaluate_from(resolved: Resolved) -> str:
    """Evaluate the newest checkpoint in `load`, as one rank; called on every rank.

    Returns:
        A line per part: its loss and perplexity.

    Raises:
        ConfigError: `load` or the data is not configured.
        CheckpointError: there is no checkpoint to load.
    """
    config = resolved.config
    folder = config.checkpoint.load
    if folder is None:
        raise ConfigError("load: no folder is given; evaluating needs the checkpoint of a training")
    groups = join_processes(resolved)
    prepare_deepspeed()
    tokenizer = load_tokenizer(config)
    check_tokenizers(resolved, tokenizer)
    position = Position.from_state(read_training_state(Path(folder), groups=groups))
    datasets = build_datasets(resolved, ("valid", "test"), position=position)
    streams = open_streams(
        resolved,
        datasets,
        groups,
        vocab_size=padded_vocab_size(config, tokenizer.vocab_size),
        end_of_document=tokenizer.end_of_document,
    )
    losses = _load_model(without_zero(resolved), Path(folder), groups, tokenizer)
    evaluator = Evaluator(
        losses,
        streams,
        iterations=config.training.eval_iters,
        accumulation=resolved.derived.accumulation,
        samples_per_iteration=resolved.derived.train_batch_size,
    )
    firsts = {"valid": position.validation_samples, "test": 0}
    names = {"valid": "validation", "test": "test"}
    lines = [
        f"{names[part]} {evaluator.evaluate(part, first)}"
        for part, first in firsts.items()
        if evaluator.has(part)
    ]
    leave_processes()
    if not lines:
        raise ConfigError(
            "there is nothing to evaluate on: eval-iters is 0, or the split leaves no documents"
        )
    return "\n".join(lines)


def _load_model(
    resolved: Resolved, folder: Path, groups: Groups, tokenizer: Tokenizer
) -> Callable[[Iterator[Batch], int], Tensor]:
    """The mean loss of micro-batches under the checkpoint's weights."""
    model = build_model(resolved, groups, vocab_size=tokenizer.vocab_size)
    model.to(device=_device(), dtype=DTYPES[resolved.derived.precision])
    load_weights(folder, model=model, groups=groups, config=recorded_values(resolved, tokenizer))
    weigh = choose_weights(resolved.config, groups)
    if resolved.derived.uses_pipeline:
        engine = build_pipeline_forward(model, micro_batch_size=resolved.derived.micro_batch_size)
        return PipelineStep(engine, weigh=weigh).evaluate
    model.eval()

    def losses(batches: Iterator[Batch], count: int) -> Tensor:
        return mean_loss(model, weigh(batches, count, _device()), groups.data)

    return losses


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
