"""What a configuration makes a training read, for commands of neox-data: `neox_data.training_data`."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from neox_data.errors import DataError
from neox_data.tokenizers import build_tokenizer
from neox_data.training_data import TrainingData
from neox_launcher.config import Resolved, load_config, resolve
from neox_launcher.config.shapes import fewest_devices
from neox_launcher.errors import NeoXError
from neox_model.train.curriculum import length_pace
from neox_model.train.datasets import build_datasets, num_samples

__all__ = ["describe_training_data", "training_data_of"]


def describe_training_data(
    paths: Sequence[Path], *, overrides: Sequence[str] = (), devices: int | None = None
) -> TrainingData:
    """What a training of these configuration files reads on so many devices (None: the fewest possible).

    Raises:
        DataError: the configuration, or the data that it names, is wrong.
    """
    try:
        config = load_config(paths, overrides=overrides)
        resolved = resolve(config, devices=devices or fewest_devices(config))
    except NeoXError as error:
        raise DataError(str(error)) from error
    return training_data_of(resolved)


def training_data_of(resolved: Resolved) -> TrainingData:
    """What a training reads; its sample indices are built where they are not there yet.

    Raises:
        DataError: the data is missing or damaged.
    """
    config, derived = resolved.config, resolved.derived
    tokenizer = config.tokenizer
    return TrainingData(
        datasets=build_datasets(resolved),
        num_samples=num_samples(resolved),
        train_iters=config.training.train_iters,
        seq_length=config.model.seq_length,
        micro_batch=derived.micro_batch_size,
        accumulation=derived.accumulation,
        data_parallel_size=derived.data_parallel_size,
        data_parallel_ranks=_data_parallel_ranks(resolved),
        build_tokenizer=partial(
            build_tokenizer,
            tokenizer.tokenizer_type,
            vocab_file=tokenizer.vocab_file,
            merge_file=tokenizer.merge_file,
        ),
        length_at=_length_at(resolved),
    )


def _length_at(resolved: Resolved) -> Callable[[int], int]:
    whole, pace = resolved.config.model.seq_length, length_pace(resolved.config)
    return lambda iteration: whole if pace is None else min(whole, pace(iteration))


def _data_parallel_ranks(resolved: Resolved) -> list[int]:
    """Of each process, its place on the data axis of (pipe, data, model), as in `parallel.topology`."""
    derived = resolved.derived
    return [
        rank // derived.model_parallel_size % derived.data_parallel_size for rank in range(derived.world_size)
    ]
