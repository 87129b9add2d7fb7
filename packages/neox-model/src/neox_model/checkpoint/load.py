"""Reading a checkpoint into any layout: each rank fills what it holds from whichever pieces cover it.

Every rank decides from the same manifest and all exchange their outcome before anything is changed that the
others would wait for, so an error is the same `CheckpointError` everywhere.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from neox_launcher.config.resume import Changes
from neox_model.checkpoint import directory as folders
from neox_model.checkpoint import rng_state
from neox_model.checkpoint.comparison import (
    changes_since,
    log_model_changes,
    log_training_changes,
    refuse_model_changes,
    refuse_state_changes,
    training_state,
)
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.engines import adapter_of, inner_optimizer, restore_engine_state
from neox_model.checkpoint.errors import CheckpointError, DamagedCheckpointError
from neox_model.checkpoint.logical import (
    Fragment,
    engine_fragments,
    model_fragments,
    restore_scalars,
    state_tensor,
)
from neox_model.checkpoint.outcome import gather, shared_outcome
from neox_model.checkpoint.save import Restorable, Schedule, layout_of, rng_prefix
from neox_model.checkpoint.shards import DTYPES, ShardReader
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import named_logical_parameters
from neox_model.parallel.random import mixed_seed, seed_streams

__all__ = ["ScheduleSource", "load_checkpoint", "load_weights", "read_training_state"]

logger = logging.getLogger(__name__)

ScheduleSource = Literal["agreement", "config", "checkpoint"]

# Optimizers whose states mean the same, so that one can go on from another's.
_ADAM = {"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam", "ZenFlowCPUAdam"}

_SAME_MODEL = "give the checkpoint's values, or let load name another folder"
_OR_FINETUNE = "give the checkpoint's values, or set finetune: true to take the weights alone"


def load_checkpoint(
    directory: Path,
    *,
    model: nn.Module,
    engine: Any,
    groups: Groups,
    schedule: Schedule,
    state: Restorable,
    config: Mapping[str, Any],
    seed: int,
    finetune: bool = False,
    load_optimizer: bool = True,
    load_rng: bool = True,
    schedule_source: ScheduleSource = "agreement",
) -> int | None:
    """Continue a run from the checkpoint that `latest` names. Collective over all ranks.

    The parallel sizes, the ZeRO stage and the precision may all differ from the writing run's; with the same
    ones the run goes on bit for bit.

    Args:
        directory: where the checkpoints and `latest` live.
        model: the module inside the engine.
        engine: the DeepSpeed engine; its weights and states are overwritten.
        groups: this rank's process groups.
        schedule: the learning-rate schedule.
        state: the training loop's state.
        config: what this run would record in a checkpoint; it is compared with what the checkpoint records.
        seed: the run's seed; with the iteration, it starts new random streams when the layout has changed.
        finetune: take the weights alone and begin at iteration 0.
        load_optimizer: take the optimizer's states.
        load_rng: take the random generators' states.
        schedule_source: whose learning-rate curve counts; `agreement` demands that both are the same.

    Returns:
        The iteration to go on from, 0 with `finetune`; None when the folder holds no checkpoint.

    Raises:
        CheckpointError: damaged, of another model, or its schedule or optimizer does not agree; the same
            message on all ranks. With `finetune` the model may differ where its weights have the same shapes.
    """
    folder = _find(directory, groups)
    if folder is None:
        return None
    fragments = engine_fragments(model, engine)
    optimizer = inner_optimizer(engine.optimizer)
    names = _all_names(model, groups)
    with _reading(folder, groups):
        manifest = Manifest.read(folder)
        changes = changes_since(manifest, config)
        if not finetune:
            refuse_model_changes(changes, remedy=_OR_FINETUNE)
        _check_weights(manifest, fragments, names, changes)
        reader = ShardReader(folder, manifest.files)
        _fill_weights(fragments, manifest, reader)
        if load_optimizer and not finetune:
            refuse_state_changes(changes)
            _fill_states(fragments, manifest, reader, optimizer)
        if not finetune:
            _restore_schedule(schedule, manifest.schedule, schedule_source)
            if load_rng:
                _restore_rng(manifest, reader, groups, seed)
    adapter_of(engine.optimizer).to_model(engine.optimizer)
    if finetune:
        logger.info("loaded the weights of %s", folder)
        if groups.world.rank == 0:
            log_model_changes(changes)
        return 0
    restore_engine_state(engine, manifest.engine, loss_scale=load_optimizer)
    state.load_state_dict(training_state(manifest))
    logger.info("loaded %s, written by %s", folder, _sizes(manifest))
    if groups.world.rank == 0:
        log_training_changes(manifest, config, keeps_curve=schedule_source == "checkpoint")
    return manifest.iteration


def read_training_state(directory: Path, *, groups: Groups) -> dict[str, Any] | None:
    """Read the state of the training loop from the newest checkpoint. Collective over all ranks.

    Args:
        directory: where the checkpoints and `latest` live.
        groups: this rank's process groups.

    Returns:
        What the state's `load_state_dict` takes; None when the folder holds no checkpoint.

    Raises:
        CheckpointError: it is damaged; the same on all ranks.
    """
    folder, found = _find(directory, groups), None
    if folder is None:
        return None
    with _reading(folder, groups):
        if groups.world.rank == 0:
            found = training_state(Manifest.read(folder))
    return gather(groups.control, found)[0]


def load_weights(directory: Path, *, model: nn.Module, groups: Groups, config: Mapping[str, Any]) -> int:
    """Fill a model that has no engine, for generation and evaluation. Collective over all ranks.

    Args:
        directory: where the checkpoints and `latest` live.
        model: any layout and dtype.
        groups: this rank's process groups.
        config: what this run would record in a checkpoint; it is compared with what the checkpoint records.

    Returns:
        The checkpoint's iteration.

    Raises:
        CheckpointError: there is none, it is damaged, or it is another model's; the same on all ranks.
    """
    folder = _find(directory, groups)
    if folder is None:
        raise CheckpointError(
            f"{directory} holds no checkpoint; train one first, or let load name another folder"
        )
    fragments = model_fragments(model)
    names = _all_names(model, groups)
    with _reading(folder, groups):
        manifest = Manifest.read(folder)
        changes = changes_since(manifest, config)
        refuse_model_changes(changes, remedy=_SAME_MODEL)
        _check_weights(manifest, fragments, names, changes)
        _fill_weights(fragments, manifest, ShardReader(folder, manifest.files))
    logger.info("loaded the weights of %s", folder)
    return manifest.iteration


def _find(directory: Path, groups: Groups) -> Path | None:
    """The newest checkpoint as rank 0 sees it, so that all ranks read the same."""
    folder = None
    with shared_outcome(groups.control, f"finding a checkpoint in {directory}"):
        if groups.world.rank == 0:
            folder = folders.find_latest(directory)
    return gather(groups.control, folder)[0]


def _all_names(model: nn.Module, groups: Groups) -> set[str]:
    """Logical names of the weights that any rank holds."""
    return set().union(*gather(groups.control, {name for name, _ in named_logical_parameters(model)}))


@contextmanager
def _reading(folder: Path, groups: Groups) -> Iterator[None]:
    with shared_outcome(groups.control, f"loading {folder}"):
        try:
            yield
        except DamagedCheckpointError as error:
            raise CheckpointError(f"{error}{folders.offer_earlier(folder.parent, folder)}") from error


def _check_weights(manifest: Manifest, fragments: list[Fragment], names: set[str], changes: Changes) -> None:
    stored = manifest.weight_names
    problems = [f"{name} is not in the checkpoint" for name in sorted(names - stored)]
    problems += [f"{name} is in the checkpoint and not in this model" for name in sorted(stored - names)]
    problems += [
        f"{fragment.name} has the shape {manifest.tensors[fragment.name].shape} in the checkpoint and "
        f"{fragment.logical.shape} in this model"
        for fragment in fragments
        if fragment.name in stored and manifest.tensors[fragment.name].shape != fragment.logical.shape
    ]
    if problems:
        more = f" (and {len(problems) - 1:,} more)" if len(problems) > 1 else ""
        differing = "".join(f"; {change}" for change in changes.model)
        raise CheckpointError(f"it is another model's: {problems[0]}{more}{differing}; {_SAME_MODEL}")


def _fill_weights(fragments: list[Fragment], manifest: Manifest, reader: ShardReader) -> None:
    for fragment in fragments:
        reader.fill(fragment.weight, fragment.name, manifest.tensors[fragment.name], fragment.range)
        if not bool(fragment.weight.isfinite().all()):
            raise DamagedCheckpointError(f"{fragment.name} holds values that are not finite")


def _fill_states(fragments: list[Fragment], manifest: Manifest, reader: ShardReader, optimizer: Any) -> None:
    _check_optimizer(manifest.optimizer, type(optimizer).__name__)
    states = defaultdict(list)
    for name in manifest.tensors.keys() - manifest.weight_names:
        weight, _, key = name.rpartition("/")
        states[weight].append(key)
    for fragment in fragments:
        for key in sorted(states[fragment.name]):
            name = f"{fragment.name}/{key}"
            record = manifest.tensors[name]
            target, wanted = state_tensor(fragment, optimizer, key, record.shape)
            reader.fill(target, name, record, wanted)
    same_class = manifest.optimizer == type(optimizer).__name__
    restore_scalars(fragments, optimizer, manifest.optimizer_scalars, same_class=same_class)


def _check_optimizer(stored: str | None, here: str) -> None:
    if stored is None:
        raise CheckpointError(
            "it holds no optimizer states (no-save-optim); set no-load-optim: true, or finetune: true"
        )
    if stored != here and not {stored, here} <= _ADAM:
        raise CheckpointError(
            f"its optimizer states are {stored}'s, this run's optimizer is {here}; "
            "set no-load-optim: true, or use the same optimizer"
        )


def _restore_schedule(schedule: Schedule, saved: Mapping[str, Any], source: ScheduleSource) -> None:
    saved = dict(saved)
    there, here = saved.pop("curve"), asdict(schedule.curve)
    if source == "checkpoint":
        schedule.curve = type(schedule.curve)(**there)
    elif source == "agreement" and there != here:
        names = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
        differing = "; ".join(f"{name} {there.get(name)} there, {here.get(name)} here" for name in names)
        raise CheckpointError(
            f"its learning-rate schedule is not the configuration's: {differing}; set "
            "override-lr-scheduler: true for the configuration's, "
            "or use-checkpoint-lr-scheduler: true for the checkpoint's"
        )
    schedule.load_state_dict(saved)


def _restore_rng(manifest: Manifest, reader: ShardReader, groups: Groups, seed: int) -> None:
    """This rank's generators as they were; new ones, seeded by the iteration, when the layout has changed."""
    prefix = rng_prefix(groups.world.rank)
    records = {name: record for name, record in manifest.tensors.items() if name.startswith(prefix)}
    if layout_of(groups) != manifest.layout or not records:
        if groups.world.rank == 0:
            reason = f"it was written by {_sizes(manifest)}" if records else "it holds none (no-save-rng)"
            logger.warning("random generators start anew, not from the checkpoint: %s", reason)
        seed_streams(mixed_seed(seed, manifest.iteration), groups)
        return
    states = {}
    for name, record in records.items():
        states[name.removeprefix(prefix)] = values = torch.empty(record.shape, dtype=DTYPES[record.dtype])
        reader.fill(values, name, record, (((0, values.numel()),), 0, values.numel()))
    rng_state.restore(states)


def _sizes(manifest: Manifest) -> str:
    layout = manifest.layout
    return f"data-parallel {layout.data} x model-parallel {layout.model} x pipe-parallel {layout.pipe}"
