"""Load a checkpoint into any layout: each rank fills its tensors from the pieces that overlap them.

All ranks read the same manifest and exchange their outcomes before the next collective operation, so an error
is the same `CheckpointError` on every rank.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from neox_config.facts.learning_rate import Curve
from neox_config.spec.refusals import OR_FINETUNE, SAME_MODEL, other_model, other_schedule, other_states
from neox_config.spec.resume import Changes
from neox_model.checkpoint import directory as folders
from neox_model.checkpoint import rng_state
from neox_model.checkpoint.base import check_base, load_base
from neox_model.checkpoint.blocks import Range, find_overlaps
from neox_model.checkpoint.comparison import (
    changes_since,
    check_schedule,
    data_state,
    log_another_order,
    log_changes,
    log_other_versions,
    log_training_changes,
    log_unknown_changes,
    refuse,
    stored_curve,
    training_state,
)
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.errors import CheckpointError, DamagedCheckpointError, DamagedManifestError
from neox_model.checkpoint.local_shards import copy_missing
from neox_model.checkpoint.logical import (
    Fragment,
    check_model_states,
    check_scalars,
    engine_fragments,
    fill_model_states,
    model_fragments,
    restore_scalars,
    state_range,
    state_tensor,
)
from neox_model.checkpoint.names import is_score, is_weight, model_state_name, rng_prefix
from neox_model.checkpoint.outcome import shared_outcome
from neox_model.checkpoint.parts import RunParts, Schedule
from neox_model.checkpoint.replica_states import (
    is_replica_state,
    log_other_replicas,
    replica_factor,
    replica_ranges,
    replica_tensor,
)
from neox_model.checkpoint.save import layout_of
from neox_model.checkpoint.shards import ShardReader
from neox_model.checkpoint.storage import Storage
from neox_model.checkpoint.whole_weights import model_problems
from neox_model.parallel.control import all_gather_object
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import LogicalState, begin_iteration, model_states, trained_names
from neox_model.parallel.random import mixed_seed, seed_streams
from neox_model.versions import package_versions

__all__ = ["ScheduleSource", "load_checkpoint", "load_weights", "read_training_state"]

logger = logging.getLogger(__name__)

ScheduleSource = Literal["agreement", "config", "checkpoint"]

# Optimizers with the same states, so that one can continue from another's.
_ADAM = {"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam", "ZenFlowCPUAdam", "RoundedAdam"}


def load_checkpoint(
    directory: Path,
    parts: RunParts,
    *,
    config: Mapping[str, Any],
    seed: int,
    finetune: bool = False,
    averages: bool = False,
    load_optimizer: bool = True,
    load_rng: bool = True,
    schedule_source: ScheduleSource = "agreement",
) -> int | None:
    """Continue a run from the checkpoint that `latest` names. Collective over all ranks.

    The parallel sizes, the ZeRO stage and the precision may differ from the writing run's. If they are the
    same, the run continues bit for bit.

    Args:
        directory: folder of the checkpoints and `latest`.
        parts: the run; its weights and states are overwritten.
        config: values that this run would record in a checkpoint, compared with the checkpoint's.
        seed: the run's random seed; with the iteration, it seeds new random streams if the layout changed.
        finetune: load only the weights and start at iteration 0.
        averages: with `finetune`, load the averages of the weights instead.
        load_optimizer: load the optimizer's states.
        load_rng: load the random generators' states.
        schedule_source: learning-rate curve to use; `agreement` requires that both are the same.

    Returns:
        The iteration to continue from, 0 with `finetune`; None if the folder contains no checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged or of a different model, or its schedule or optimizer
            differs; the same message on all ranks. With `finetune` the model may differ if its weights have
            the same shapes.
        ModelError: the master weights of this engine cannot be read.
    """
    groups = parts.groups
    folder = _find(directory, groups)
    if folder is None:
        return None
    optimizer = parts.engine.update.optimizer if load_optimizer and not finetune else None
    names, remedy = _all_names(parts.model, groups), None if finetune else OR_FINETUNE
    model_states = () if finetune else parts.model_states
    with parts.engine.update.in_memory(changes=True):
        fragments = engine_fragments(parts.engine)
        with _reading(folder, groups, parts.storage):
            manifest, changes = _read_manifest(
                folder, fragments, names, config, remedy=remedy, averages=averages and finetune
            )
        if finetune:
            # New scores stay initialized.
            fragments = [each for each in fragments if each.name in manifest.tensors]
        _copy_missing(folder, manifest, fragments, groups, parts.storage, model_states)
        reader = ShardReader(folder, manifest)
        with _reading(folder, groups, parts.storage):
            _check_weight_values(fragments, model_states, manifest, reader)
            if optimizer is not None:
                refuse(other_states(changes))
                _check_states(fragments, manifest, reader, optimizer)
            states = None if finetune else _read_states(parts, manifest, reader, schedule_source, load_rng)
        # Every rank has checked all that it loads: only now is anything overwritten.
        with _reading(folder, groups, parts.storage):
            _fill_weights(fragments, model_states, reader)
            if optimizer is not None:
                _fill_states(fragments, manifest, reader, optimizer)
        parts.engine.update.to_model()
    if groups.world.rank == 0:
        log_unknown_changes(changes)
    if states is None:
        logger.info("loaded the weights of %s", folder)
        if groups.world.rank == 0 and changes.model:
            log_changes("finetune: the model differs from the checkpoint's", changes.model)
        return 0
    with _reading(folder, groups, parts.storage):
        curve, training, generators = states
        parts.schedule.curve = curve
        parts.schedule.load_state_dict({"applied_updates": manifest.schedule["applied_updates"]})
        parts.engine.load_state_dict(manifest.engine, loss_scale=load_optimizer)
        parts.state.load_state_dict(training)
        if load_rng:
            _restore_rng(generators, manifest, groups, seed)
    logger.info("loaded %s, written by %s", folder, _sizes(manifest))
    if groups.world.rank == 0:
        log_training_changes(changes, keeps_curve=schedule_source == "checkpoint")
        log_another_order(manifest, config)
        if optimizer is not None:
            log_other_replicas(manifest, optimizer)
        log_other_versions(manifest, package_versions())
    return manifest.iteration


def _read_states(
    parts: RunParts, manifest: Manifest, reader: ShardReader, source: ScheduleSource, load_rng: bool
) -> tuple[Curve, dict[str, Any], dict[str, torch.Tensor] | None]:
    """Read and check the states besides weights and optimizer.

    Returns:
        The learning-rate curve to continue with, the state of the training loop, and the states of this
        rank's random generators; None to seed them, or to leave them as they are.
    """
    missing = sorted(parts.engine.missing_counters(manifest.engine))
    if missing:
        raise DamagedManifestError(f"engine has no {', '.join(missing)}")
    curve, training = _chosen_curve(parts.schedule, manifest, source), training_state(manifest)
    if not load_rng or layout_of(parts.groups) != manifest.layout:
        return curve, training, None
    return curve, training, rng_state.read(manifest, reader, parts.groups.world.rank)


def read_training_state(directory: Path, *, groups: Groups) -> dict[str, Any] | None:
    """Read the state of the training loop from the latest checkpoint. Collective over all ranks.

    Args:
        directory: folder of the checkpoints and `latest`.
        groups: this rank's process groups.

    Returns:
        The argument of the state's `load_state_dict`; None if the folder contains no checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged; the same on all ranks.
    """
    folder, found = _find(directory, groups), None
    if folder is None:
        return None
    with _reading(folder, groups):
        if groups.world.rank == 0:
            found = data_state(Manifest.read(folder))
    return all_gather_object(groups.control, found)[0]


def load_weights(
    directory: Path,
    *,
    model: nn.Module,
    groups: Groups,
    config: Mapping[str, Any],
    base: str | None = None,
    cache: str | None = None,
    storage: Storage | None = None,
    averages: bool = False,
) -> int:
    """Load weights into a model without an engine, for generation and evaluation. Collective over all ranks.

    Args:
        directory: folder of the checkpoints and `latest`.
        model: the model, in any layout and dtype.
        groups: this rank's process groups.
        config: values that this run would record in a checkpoint, compared with the checkpoint's.
        base: as `directory` of `load_base`: where the weights without adapters are; None: there are none.
        cache: directory of downloads of the base from object stores; None for the default.
        storage: the folders of checkpoints; None: all ranks share one.
        averages: load the averages of the weights instead.

    Returns:
        The checkpoint's iteration.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or of a different model; the same on all ranks.
    """
    found = load_base(
        base,
        model,
        adapters=directory,
        groups=groups,
        config=config,
        writable=nullcontext,
        cache=cache,
    )
    config = {**config, **found}
    folder = _find(directory, groups)
    if folder is None:
        raise CheckpointError(
            f"{directory} contains no checkpoint; train a model first, or set load to another folder",
            code="no-checkpoint",
        )
    fragments, states = model_fragments(model), model_states(model)
    names = _all_names(model, groups)
    with _reading(folder, groups, storage):
        manifest, changes = _read_manifest(
            folder, fragments, names, config, remedy=SAME_MODEL, averages=averages
        )
    _copy_missing(folder, manifest, fragments, groups, storage, states)
    reader = ShardReader(folder, manifest)
    with _reading(folder, groups, storage):
        _check_weight_values(fragments, states, manifest, reader)
    with _reading(folder, groups, storage):
        _fill_weights(fragments, states, reader)
    begin_iteration(model, manifest.iteration)
    if groups.world.rank == 0:
        log_unknown_changes(changes)
    logger.info("loaded the weights of %s", folder)
    return manifest.iteration


def _find(directory: Path, groups: Groups) -> Path | None:
    """Return the latest checkpoint that rank 0 finds, so that all ranks read the same one."""
    folder = None
    with shared_outcome(groups.control, f"finding a checkpoint in {directory}", keeps_bugs=True):
        if groups.world.rank == 0:
            folder = folders.find_latest(directory)
    return all_gather_object(groups.control, folder)[0]


def _all_names(model: nn.Module, groups: Groups) -> set[str]:
    """Return the logical names of the weights that checkpoints contain, of all ranks."""
    return set().union(*all_gather_object(groups.control, set(trained_names(model))))


@contextmanager
def _reading(folder: Path, groups: Groups, storage: Storage | None = None) -> Iterator[None]:
    with shared_outcome(groups.control, f"loading {folder}", keeps_bugs=True):
        try:
            yield
        except DamagedCheckpointError as error:
            are_several = storage is not None and len(storage.leaders) > 1
            offer = folders.offer_earlier(folder.parent, folder, on_every_host=are_several)
            raise CheckpointError(f"{error}{offer}", code=error.code) from error


def _copy_missing(
    folder: Path,
    manifest: Manifest,
    fragments: list[Fragment],
    groups: Groups,
    storage: Storage | None,
    states: Sequence[LogicalState] = (),
) -> None:
    """Copy the shards that hosts with a folder of their own lack, and their ranks read. Collective."""
    if storage is None or not storage.is_local:
        return
    ranges: dict[str, list[Range]] = defaultdict(list)
    for fragment in fragments:
        ranges[fragment.name].append(fragment.range)
    whole = {model_state_name(state.name) for state in states}
    wanted = set()
    for name, record in manifest.tensors.items():
        weight = name if is_weight(name) else name.rpartition("/")[0]
        # A state of another shape than its weight's is read by rules of its optimizer.
        is_alike = weight in manifest.tensors and record.shape == manifest.tensors[weight].shape
        reads_whole = name.startswith(rng_prefix(groups.world.rank)) or name in whole
        reads_whole |= weight in ranges and not is_alike
        wanted |= {
            piece.file
            for piece in record.pieces
            if reads_whole or any(find_overlaps(piece.range, one) for one in ranges.get(weight, ()))
        }
    copy_missing(folder, manifest.files, wanted, storage, groups.control)


def _read_manifest(
    folder: Path,
    fragments: list[Fragment],
    names: set[str],
    config: Mapping[str, Any],
    *,
    remedy: str | None,
    averages: bool = False,
) -> tuple[Manifest, Changes]:
    """Read a manifest, and compare it with the model of this run.

    Args:
        folder: the checkpoint.
        fragments: what this rank holds.
        names: logical names of the weights of all ranks.
        config: values that this run would record in a checkpoint.
        remedy: what to do about a different model; None: it is accepted if its weights have these shapes.
        averages: the averages of the weights are read as weights.

    Returns:
        The manifest, and the values that differ from this run's.
    """
    manifest = Manifest.read(folder)
    manifest = manifest.with_averages() if averages else manifest
    changes = changes_since(manifest, config)
    check_base(manifest, config)
    if remedy is not None:
        refuse(other_model(changes, remedy=remedy))
    else:
        # A model that is pruned from now on has new scores.
        names = {name for name in names if name in manifest.tensors or not is_score(name)}
    _check_weights(manifest, fragments, names, changes)
    return manifest, changes


def _check_weights(manifest: Manifest, fragments: list[Fragment], names: set[str], changes: Changes) -> None:
    shapes = ((fragment.name, fragment.logical.shape) for fragment in fragments)
    problems = model_problems(names, shapes, manifest)
    if problems:
        more = f" (and {len(problems) - 1:,} more)" if len(problems) > 1 else ""
        differing = "".join(f"; {change}" for change in changes.model)
        raise CheckpointError(
            f"the checkpoint contains a different model: {problems[0]}{more}{differing}; {SAME_MODEL}",
            code="different-model",
        )


def _check_weight_values(
    fragments: list[Fragment], states: Sequence[LogicalState], manifest: Manifest, reader: ShardReader
) -> None:
    reader.check((fragment.name, fragment.range, fragment.weight.dtype) for fragment in fragments)
    check_model_states(states, manifest, reader)


def _fill_weights(fragments: list[Fragment], states: Sequence[LogicalState], reader: ShardReader) -> None:
    for fragment in fragments:
        reader.fill(fragment.weight, fragment.name, fragment.range)
    fill_model_states(states, reader)


def _check_states(fragments: list[Fragment], manifest: Manifest, reader: ShardReader, optimizer: Any) -> None:
    _check_optimizer(manifest, type(optimizer).__name__)
    reader.check(
        (f"{fragment.name}/{key}", wanted, None)
        for fragment, key, shape in _stored_states(fragments, manifest)
        for wanted in _state_ranges(fragment, optimizer, key, shape)
    )
    same_class = manifest.optimizer == type(optimizer).__name__
    check_scalars(fragments, manifest.optimizer_scalars, same_class=same_class)


def _fill_states(fragments: list[Fragment], manifest: Manifest, reader: ShardReader, optimizer: Any) -> None:
    for fragment, key, shape in _stored_states(fragments, manifest):
        _fill_state(fragment, optimizer, key, shape, reader)
    same_class = manifest.optimizer == type(optimizer).__name__
    restore_scalars(fragments, optimizer, manifest.optimizer_scalars, same_class=same_class)


def _state_ranges(fragment: Fragment, optimizer: Any, key: str, shape: tuple[int, ...]) -> list[Range]:
    """Return the ranges of a stored state whose sum this rank's part is; most states have one."""
    if is_replica_state(optimizer, key):
        return replica_ranges(fragment, optimizer, key, shape)
    return [state_range(fragment, optimizer, key, shape)]


def _fill_state(
    fragment: Fragment, optimizer: Any, key: str, shape: tuple[int, ...], reader: ShardReader
) -> None:
    """Read this rank's part of a state; a replica without others has no compression errors."""
    ranges, name = _state_ranges(fragment, optimizer, key, shape), f"{fragment.name}/{key}"
    if not is_replica_state(optimizer, key):
        reader.fill(state_tensor(fragment, optimizer, key, shape), name, ranges[0])
        return
    if not ranges and optimizer.data_group.size == 1:
        return
    target = replica_tensor(fragment, optimizer, key)
    if not ranges:
        target.zero_()
        return
    reader.fill(target, name, ranges[0])
    for wanted in ranges[1:]:
        other = torch.empty_like(target)
        reader.fill(other, name, wanted)
        target += other
    target *= replica_factor(optimizer, key, shape)


def _stored_states(
    fragments: list[Fragment], manifest: Manifest
) -> Iterator[tuple[Fragment, str, tuple[int, ...]]]:
    """Yield the optimizer states of the fragments, with their names and whole shapes."""
    states = defaultdict(list)
    for name in manifest.tensors.keys() - manifest.weight_names:
        weight, _, key = name.rpartition("/")
        states[weight].append(key)
    for fragment in fragments:
        for key in sorted(states[fragment.name]):
            yield fragment, key, manifest.tensors[f"{fragment.name}/{key}"].shape


def _check_optimizer(manifest: Manifest, here: str) -> None:
    stored = manifest.optimizer
    if stored is None:
        lacking = ["no-load-optim: true"]
        if not _has_generators(manifest):
            # As one that was converted from GPT-NeoX, without its learning-rate schedule.
            lacking += ["no-load-rng: true", "override-lr-scheduler: true"]
        raise CheckpointError(
            "the checkpoint contains no optimizer states; to continue with new ones, set finetune: false, "
            f"{', '.join(lacking)}; to start at iteration 0 with its weights, set finetune: true",
            code="no-optimizer-states",
        )
    if stored != here and not {stored, here} <= _ADAM:
        raise CheckpointError(
            f"the checkpoint's optimizer states are those of {stored}, but this run's optimizer is {here}; "
            "set no-load-optim: true, or use the same optimizer"
        )


def _chosen_curve(schedule: Schedule, manifest: Manifest, source: ScheduleSource) -> Curve:
    """Return the learning-rate curve to continue with; check the schedule's state.

    Raises:
        CheckpointError: the curves differ and none was chosen, or the chosen one does not fit the optimizer.
        DamagedCheckpointError: the checkpoint's schedule is incomplete.
    """
    check_schedule(manifest)
    if source == "agreement":
        refuse(other_schedule(manifest.schedule, schedule.curve))
    if source != "checkpoint":
        return schedule.curve
    curve = stored_curve(manifest)
    if not schedule.accepts(curve):
        raise CheckpointError(
            f"the checkpoint's learning-rate schedule, {type(curve).__name__}, changes the momentum, "
            "and this run's optimizer has none; use the same optimizer, or set override-lr-scheduler: true"
        )
    return curve


def _has_generators(manifest: Manifest) -> bool:
    """Return whether a checkpoint has the states of random generators."""
    return any(name.startswith(rng_prefix(0)) for name in manifest.tensors)


def _restore_rng(
    states: dict[str, torch.Tensor] | None, manifest: Manifest, groups: Groups, seed: int
) -> None:
    """Restore this rank's random generators, or seed them by the iteration."""
    if states is not None:
        rng_state.restore(states)
        return
    if groups.world.rank == 0:
        reason = (
            f"the checkpoint was written by {_sizes(manifest)}"
            if _has_generators(manifest)
            else "the checkpoint contains none (no-save-rng)"
        )
        logger.warning("random generator states are not restored but seeded again: %s", reason)
    seed_streams(mixed_seed(seed, manifest.iteration), groups)


def _sizes(manifest: Manifest) -> str:
    layout = manifest.layout
    return f"data-parallel {layout.data} x model-parallel {layout.model} x pipe-parallel {layout.pipe}"
