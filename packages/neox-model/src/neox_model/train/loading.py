"""Continue from a checkpoint: where it is, where the data continues, and what is left out."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from neox_config.atomic import atomic_write
from neox_config.errors import NeoXError
from neox_config.facts.checkpoints import complete_checkpoints, is_checkpoint, iteration_of
from neox_config.facts.spikes import LEFT_OUT
from neox_config.facts.stores import is_url
from neox_config.schema.sections.adapters import AdaptersSection
from neox_config.schema.sections.checkpoint import CheckpointSection
from neox_config.spec.resume import in_effect
from neox_model.checkpoint.contents import are_ranges
from neox_model.checkpoint.downloads import local_folder
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.load import ScheduleSource, load_checkpoint, read_training_state
from neox_model.checkpoint.outcome import shared_outcome
from neox_model.checkpoint.storage import Storage
from neox_model.checkpoint.store_claim import warn_of_newer
from neox_model.parallel.control import all_gather_object
from neox_model.parallel.groups import Groups
from neox_model.train.data.documents import digest_of_samples
from neox_model.train.data.position import START, Position, Ranges, as_ranges, merged
from neox_model.train.run import Run

__all__ = [
    "add_left_out",
    "folder_to_load",
    "has_start",
    "leave_out",
    "load_into",
    "owner_of",
    "position_in",
    "read_left_out",
    "write_left_out",
]

logger = logging.getLogger(__name__)

Owner = Callable[[int], Mapping[str, str]]
"""Returns what identifies a run and the order of its first samples, of which the number is given."""


def folder_to_load(
    section: CheckpointSection, adapters: AdaptersSection, groups: Groups, storage: Storage
) -> Path | None:
    """Return the folder of checkpoints to load from, None to start anew. Collective over all ranks.

    Raises:
        CheckpointError: an object store contains no checkpoint, and this run does not save to it.
    """
    if section.load is None:
        return None
    folder = local_folder(
        section.load,
        groups,
        cache=section.store_cache,
        storage=storage,
        weights_only=section.finetune and not section.load_ema,
    )
    if folder is None:
        store = section.checkpoint_store or ""
        if section.load.rstrip("/") != store.rstrip("/") or section.finetune:
            raise CheckpointError(
                f"{section.load} contains no checkpoint; to start from new weights, leave load out or set it "
                "to the same URL as checkpoint-store"
            )
        logger.info("%s contains no checkpoint: starting from %s", section.load, _new(adapters))
    elif is_url(section.load) and section.save is not None and not section.finetune:
        with shared_outcome(groups.control, f"finding checkpoints in {section.save}"):
            if groups.world.rank == 0:
                [loaded] = complete_checkpoints(folder)
                warn_of_newer(Path(section.save), section.load, iteration_of(loaded.name) or 0)
    return folder


def position_in(load: Path | None, groups: Groups, *, finetune: bool) -> Position:
    """Return the position from which the data continues. Collective over all ranks."""
    if load is None or finetune:
        return START
    return Position.from_state(read_training_state(load, groups=groups))


def load_into(run: Run, position: Position) -> bool:
    """Continue from the latest checkpoint in the folder to load from, if there is one.

    Returns:
        Whether there is one.

    Raises:
        CheckpointError: it cannot be loaded, or is not the one that `position` was read from.
    """
    section, override = run.config.checkpoint, run.config.lr_schedule
    if run.load is None:
        return False
    source: ScheduleSource = "checkpoint" if override.use_checkpoint_lr_scheduler else "agreement"
    iteration = load_checkpoint(
        run.load,
        run,
        config=run.recorded(position),
        seed=run.config.training.seed,
        finetune=section.finetune,
        averages=section.load_ema,
        load_optimizer=not section.no_load_optim,
        load_rng=not section.no_load_rng,
        schedule_source="config" if override.override_lr_scheduler else source,
    )
    if iteration is None:
        logger.info("%s contains no checkpoint: starting from %s", section.load, _new(run.config.adapters))
    # A checkpoint's schedule may let the momentum grow.
    momentum = run.schedule.curve.momentum(run.state.last_iteration - 1)
    if momentum is not None and momentum >= 1:
        raise CheckpointError(
            f"the checkpoint's learning-rate schedule makes the momentum {momentum:.6g} in the last "
            "iteration; it must be less than 1; set override-lr-scheduler: true, or a smaller train-iters"
        )
    if run.state.position != position:
        raise CheckpointError(
            f"another checkpoint appeared in {section.load} while this run was starting; start again, "
            "and make sure that no other run saves to that folder"
        )
    return iteration is not None


def has_start(section: CheckpointSection, resumes: bool) -> bool:
    """Return whether `save` already contains the state from which this run starts."""
    if section.load is None or section.save is None or not resumes:
        return False
    starts_anew = section.finetune or section.no_load_optim or section.no_load_rng
    load = Path(section.load).resolve()
    folder = load.parent if is_checkpoint(load) else load
    return not starts_anew and folder == Path(section.save).resolve()


def add_left_out(run: Run) -> None:
    """Add the samples that rollbacks left out to the state; in `save`, another run's list is deleted.

    Collective over all ranks. A rollback writes to `save`, and if that contains no checkpoint yet, the next
    attempt resumes from `load` again; therefore both are read.
    """
    section, state, control = run.config.checkpoint, run.state, run.groups.control
    folders = [
        *(() if run.load is None or section.finetune else (run.load,)),
        *(() if section.save is None else (Path(section.save),)),
    ]
    with shared_outcome(control, "reading which samples to leave out"):
        found: list[Ranges] = []
        if control.rank == 0:
            owner = owner_of(run)
            distinct = {folder.resolve(): folder for folder in folders}.values()
            found = [_left_out_in(folder, owner, save=section.save, load=run.load) for folder in distinct]
    state.left_out = merged(
        state.left_out, *(ranges for each in all_gather_object(control, found) for ranges in each)
    )
    end = len(run.datasets["train"])
    for first, stop in state.left_out if control.rank == 0 else ():
        if stop > state.samples and first < end:
            logger.warning("samples %d to %d are left out", first, min(stop, end) - 1)


def owner_of(run: Run) -> Owner:
    """Return what identifies a run in its list of samples to leave out, on rank 0."""
    model = json.dumps(in_effect(run.resolved)["model"], sort_keys=True, allow_nan=False)
    digest = hashlib.sha256(model.encode()).hexdigest()[:16]
    return lambda count: {"model": digest, "samples": digest_of_samples(run.datasets["train"], count)}


def _left_out_in(folder: Path, owner: Owner, *, save: str | None, load: Path | None) -> Ranges:
    found = read_left_out(folder, owner)
    if found is not None:
        return found
    others = "belongs to a run of another model or of other samples"
    is_saved_to = save is not None and folder.resolve() == Path(save).resolve()
    if not is_saved_to or (load is not None and folder.resolve() == load.resolve()):
        logger.warning("%s %s and is not used", folder / LEFT_OUT, others)
    else:
        logger.warning("%s %s and is deleted", folder / LEFT_OUT, others)
        (folder / LEFT_OUT).unlink(missing_ok=True)
    return ()


def _new(adapters: AdaptersSection) -> str:
    return "newly initialized adapters" if adapters.lora_rank else "newly initialized weights"


def leave_out(run: Run, ranges: Ranges) -> None:
    """Store the samples that the next attempts leave out. Collective over all ranks.

    Raises:
        NeoXError: they cannot be stored.
    """
    save, control = run.config.checkpoint.save, run.groups.control
    assert save is not None, "a rollback requires `save`"
    try:
        with shared_outcome(control, "storing the samples to leave out"):
            if control.rank == 0:
                write_left_out(Path(save), ranges, owner_of(run))
    except CheckpointError as error:
        # Not a failure to save a checkpoint, after which the run would continue.
        raise NeoXError(f"a loss is a spike, and {error}") from error


def write_left_out(folder: Path, ranges: Ranges, owner: Owner) -> None:
    """Write the ranges of samples that later attempts of this run leave out."""
    content = {"left_out": [list(each) for each in ranges], "owner": owner(_end(ranges))}
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / LEFT_OUT, is_durable=True) as file:
        json.dump(content, file, allow_nan=False)
        file.write("\n")


def read_left_out(folder: Path, owner: Owner) -> Ranges | None:
    """Return the ranges of samples to leave out; None if the file belongs to another run.

    Raises:
        CheckpointError: the file exists and cannot be read, or is damaged.
    """
    path = folder / LEFT_OUT
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it is not JSON ({type(error).__name__})") from error
    if not isinstance(content, dict) or not isinstance(content.get("owner"), dict):
        raise _damaged(path, "owner is missing")
    if not are_ranges(content.get("left_out")):
        raise _damaged(path, "left_out is not an ordered list of ranges [first, stop] with first < stop")
    ranges = as_ranges(content["left_out"])
    return ranges if content["owner"] == owner(_end(ranges)) else None


def _end(ranges: Ranges) -> int:
    return max((stop for _, stop in ranges), default=0)


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path}, the list of samples that a rollback left out, is damaged: {why}; delete it to train on them"
    )
