"""Describe the data that a run reads, for commands of neox-data (`neox_data.training_data`)."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from neox_config import Resolved, load_config, resolve
from neox_config.errors import NeoXError
from neox_config.estimate.setup import fewest_devices
from neox_config.extras.data_efficiency.curricula import length_schedule
from neox_config.facts.topology import Topology
from neox_config.schema.sections.checkpoint import CheckpointSection
from neox_data.batch_sizes import BatchSizes
from neox_data.errors import DataError
from neox_data.tokenizers import build_tokenizer
from neox_data.training_data import TrainingData
from neox_launcher.plan.epochs import with_iterations
from neox_launcher.protocol.kept_checkpoints import find_kept
from neox_model.train.data.datasets import build_datasets, num_samples
from neox_model.train.data.position import START, Position

__all__ = ["describe_training_data", "training_data_of"]


def describe_training_data(
    paths: Sequence[Path],
    *,
    overrides: Sequence[str] = (),
    devices: int | None = None,
    checkpoint: str | None = None,
) -> TrainingData:
    """Describe the data that a run with these configuration files reads.

    Args:
        paths: configuration files, which are merged.
        overrides: `name=value` pairs that override the files.
        devices: number of devices of the job; None: the fewest possible.
        checkpoint: use the batch sizes recorded in this checkpoint.

    Raises:
        DataError: the configuration, its data or the checkpoint is invalid.
    """
    try:
        config = load_config(paths, overrides=overrides)
        devices = devices or fewest_devices(config)
        resolved = resolve(with_iterations(config, devices=devices), devices=devices)
        position = START if checkpoint is None else _position_at(checkpoint, config.checkpoint)
    except NeoXError as error:
        raise DataError(str(error)) from error
    return training_data_of(resolved, position)


def _position_at(checkpoint: str, section: CheckpointSection) -> Position:
    kept = find_kept(checkpoint, (section.save, section.load), option="--checkpoint")
    position = Position.from_state({"batch_sizes": (), **kept.training})
    if not position.knows_batch_sizes:
        raise DataError(
            f"{kept.path} does not record the batch sizes of all iterations, because it or one before "
            "it was written by an earlier version; trace without --checkpoint, which assumes the "
            "configuration's batch size for every iteration"
        )
    return position


def training_data_of(resolved: Resolved, position: Position = START) -> TrainingData:
    """Describe the data that a run reads; build its sample indices if they do not exist.

    Args:
        resolved: the configuration.
        position: position from which the run continues with the configuration's batch size.

    Raises:
        DataError: the data is missing or damaged.
    """
    training, data, batch = resolved.config.training, resolved.data, resolved.run.batch
    layout = resolved.run.layout
    topology = Topology(pipe=layout.stages, data=layout.data, model=layout.tensor)
    tokenizer, schedule = data.tokenizer, length_schedule(data.efficiency)
    return TrainingData(
        datasets=build_datasets(resolved, position=position),
        num_samples=num_samples(training, batch.whole, position),
        train_iters=training.iterations,
        seq_length=data.length,
        batch_sizes=BatchSizes(position.batch_sizes).then(position.iteration, batch.whole),
        micro_batch=batch.micro,
        accumulation=batch.accumulation,
        data_parallel_size=layout.data,
        data_parallel_ranks=[topology.index_along("data", rank) for rank in range(topology.world_size)],
        build_tokenizer=partial(
            build_tokenizer,
            tokenizer.tokenizer_type,
            vocab_file=tokenizer.vocab_file,
            merge_file=tokenizer.merge_file,
        ),
        length_at=lambda iteration: (
            (data.length if schedule is None else min(data.length, schedule(iteration))) + data.behind_input
        ),
        left_out=position.left_out,
    )
