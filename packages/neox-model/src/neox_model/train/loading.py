"""Continue from a checkpoint: where it is, where the data continues, and what is left out."""

import logging
from pathlib import Path

from neox_config import NeoXConfig
from neox_launcher.worker.reporting import is_restart
from neox_model.checkpoint.downloads import local_folder
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.load import ScheduleSource, load_checkpoint, read_training_state
from neox_model.checkpoint.outcome import gather, shared_outcome
from neox_model.parallel.groups import Groups
from neox_model.train.data.documents import documents_of
from neox_model.train.data.position import START, Position
from neox_model.train.left_out import forget_left_out, merged, read_left_out
from neox_model.train.training import Training

__all__ = ["add_left_out", "folder_to_load", "has_start", "load_into", "position_in"]

logger = logging.getLogger(__name__)


def folder_to_load(config: NeoXConfig, groups: Groups) -> Path | None:
    """Return the folder of checkpoints to load from, None to start anew. Collective over all ranks.

    Raises:
        CheckpointError: an object store contains no checkpoint, and this training does not save to it.
    """
    section = config.checkpoint
    if section.load is None:
        return None
    folder = local_folder(section.load, groups, cache=section.store_cache)
    if folder is None:
        if section.load != section.checkpoint_store or section.finetune:
            raise CheckpointError(
                f"{section.load} contains no checkpoint; to start from new weights, leave load out or set it "
                "to the same URL as checkpoint-store"
            )
        logger.info("%s contains no checkpoint: starting from newly initialized weights", section.load)
    return folder


def position_in(config: NeoXConfig, load: Path | None, groups: Groups) -> Position:
    """Return the position from which the data continues. Collective over all ranks."""
    if load is None or config.checkpoint.finetune:
        return START
    return Position.from_state(read_training_state(load, groups=groups))


def load_into(training: Training, position: Position) -> bool:
    """Continue from the latest checkpoint in the folder to load from, if there is one.

    Returns:
        Whether there is one.

    Raises:
        CheckpointError: it cannot be loaded, or is not the one that `position` was read from.
    """
    section = training.config.checkpoint
    if training.load is None:
        return False
    iteration = load_checkpoint(
        training.load,
        training,
        config=training.recorded(position),
        seed=training.config.training.seed,
        finetune=section.finetune,
        load_optimizer=not section.no_load_optim,
        load_rng=not section.no_load_rng,
        schedule_source=_schedule_source(training.config),
    )
    if iteration is None:
        logger.info("%s contains no checkpoint: starting from newly initialized weights", section.load)
    _check_momentum(training)
    if training.state.position != position:
        raise CheckpointError(
            f"another checkpoint appeared in {section.load} while this training was starting; start again, "
            "and make sure that no other training saves to that folder"
        )
    return iteration is not None


def has_start(config: NeoXConfig, resumes: bool) -> bool:
    """Return whether `save` already contains the state from which this training starts."""
    section = config.checkpoint
    if section.load is None or section.save is None or not resumes:
        return False
    starts_anew = section.finetune or section.no_load_optim or section.no_load_rng
    return not starts_anew and Path(section.load).resolve() == Path(section.save).resolve()


def _check_momentum(training: Training) -> None:
    """Check that a checkpoint's schedule, whose momentum may grow, keeps it below 1 until the end."""
    momentum = training.schedule.curve.momentum(training.state.last_iteration - 1)
    if momentum is not None and momentum >= 1:
        raise CheckpointError(
            f"the checkpoint's learning-rate schedule makes the momentum {momentum:.6g} in the last "
            "iteration; it must be less than 1; set override-lr-scheduler: true, or a smaller train-iters"
        )


def _schedule_source(config: NeoXConfig) -> ScheduleSource:
    if config.lr_schedule.override_lr_scheduler:
        return "config"
    return "checkpoint" if config.lr_schedule.use_checkpoint_lr_scheduler else "agreement"


def add_left_out(training: Training) -> None:
    """Add the samples that a rollback leaves out to the state; a new training deletes an older file of them.

    Collective over all ranks.
    """
    section, state, control = training.config.checkpoint, training.state, training.groups.control
    resumed = section.save if is_restart() else None if section.finetune else training.load
    with shared_outcome(control, "reading which samples to leave out"):
        found = () if resumed is None or control.rank else read_left_out(Path(resumed))
        if section.save not in (None, resumed) and control.rank == 0:
            forget_left_out(Path(section.save))
    state.left_out = merged(state.left_out, *gather(control, found))
    for first, stop in state.left_out:
        if stop > state.samples:
            named = documents_of(training.datasets.get("train"), range(first, stop))
            logger.warning("samples %d to %d, from %s, are left out", first, stop - 1, named)
