"""Save a checkpoint: each rank writes one shard, then rank 0 writes the manifest and renames the folder."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from neox_config.facts.checkpoints import MANIFEST, checkpoint_name
from neox_config.pluralize import pluralize
from neox_model.checkpoint import directory as folders
from neox_model.checkpoint import rng_state
from neox_model.checkpoint.contents import Layout, Manifest, TensorRecord
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.logical import (
    engine_fragments,
    is_written_here,
    model_state_parts,
    optimizer_parts,
)
from neox_model.checkpoint.names import rng_prefix
from neox_model.checkpoint.outcome import shared_outcome
from neox_model.checkpoint.parts import RunParts
from neox_model.checkpoint.replica_states import replica_parts, shared_weight
from neox_model.checkpoint.shards import (
    Part,
    WrittenPiece,
    plan_shard,
    records_of,
    write_durably,
    write_shard,
)
from neox_model.checkpoint.storage import Storage
from neox_model.parallel.control import all_gather_object, gather_object
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import trained_names
from neox_model.versions import package_versions

__all__ = ["Saving", "layout_of", "save_checkpoint", "shard_size"]

logger = logging.getLogger(__name__)

_SHARE_THE_FOLDER = (
    "set save to a folder on a file system that all hosts share, or checkpoint.use_node_local_storage: true"
)


@dataclass(frozen=True, slots=True)
class _Shard:
    """What one rank sends to those that write a manifest.

    Args:
        scalars: weight name to the optimizer's single-number states.
        names: logical names of the rank's weights.
        manifest: what is in it besides the ranks' values; None: rank 0 sends it.
        file: name of the shard.
        size: of the shard in bytes.
        pieces: what the shard contains.
    """

    scalars: dict[str, dict[str, Any]]
    names: set[str]
    manifest: Manifest | None
    file: str
    size: int = 0
    pieces: Sequence[WrittenPiece] = ()


def save_checkpoint(
    directory: Path,
    parts: RunParts,
    *,
    iteration: int,
    config: Mapping[str, Any],
    save_optimizer: bool = True,
    save_rng: bool = True,
    keep_last: int | None = None,
) -> Path:
    """Save a checkpoint of a training run. Collective over all ranks, which must share the folder.

    The checkpoint appears with the last rename. If any rank fails, the written files are removed and every
    rank raises.

    Args:
        directory: folder of the checkpoints and `latest`.
        parts: the run, between two iterations.
        iteration: finished updates; names the checkpoint.
        config: plain values that a later load compares with its own: the parameters by name, and derived
            values (`neox_config.spec.resume.recorded_values`).
        save_optimizer: save the optimizer's states.
        save_rng: save the random generators' states.
        keep_last: number of checkpoints to keep; older ones are deleted. None keeps all.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: the checkpoint could not be written on some rank; the same message on all ranks.
    """
    saving = Saving(directory, parts, iteration=iteration, keep_last=keep_last)
    try:
        saving.create_folder()
        with saving.shared_outcome(), parts.engine.update.in_memory():
            values = saving.capture(parts, config=config, save_optimizer=save_optimizer, save_rng=save_rng)
            pieces, size = write_shard(saving.shard, values)
        saving.collect(pieces, size)
        for publish in saving.publications():
            with saving.shared_outcome():
                publish()
    except CheckpointError:  # As on all ranks.
        saving.abandon()
        raise
    return saving.final


class Saving:
    """One checkpoint while it is being saved.

    In this order: `create_folder`, `capture`, writing the captured values to `shard`, `collect`, then each of
    `publications`, after the one before has succeeded on all ranks.

    Args:
        directory: folder of the checkpoints and `latest`.
        run: the run.
        iteration: finished updates; names the checkpoint.
        keep_last: number of checkpoints to keep; None keeps all.
    """

    def __init__(self, directory: Path, run: RunParts, *, iteration: int, keep_last: int | None) -> None:
        groups = run.groups
        self.iteration = iteration
        self.final = directory / checkpoint_name(iteration)
        self.temporary = folders.unfinished(self.final)
        self.shard = self.temporary / f"shard-{groups.world.rank:05d}.safetensors"
        self._groups = groups
        self._storage = run.storage or Storage.shared(groups)
        self._is_placed = self._is_announced = False
        self._keep_last = keep_last
        self._started = time.perf_counter()

    def shared_outcome(self) -> AbstractContextManager[None]:
        """Run a block on every rank; if it fails on one, raise the same error on all. Collective.

        Raises:
            CheckpointError: the first failing rank's message.
        """
        return shared_outcome(self._groups.control, f"saving {self.final}")

    def abandon(self) -> None:
        """Delete the unfinished checkpoint. Does not communicate."""
        if not self._storage.leads:
            return
        if self._storage.is_local and not self._is_announced:
            if self._is_placed:  # Another host has failed.
                folders.withdraw(self.final)
            folders.restore(self.final)
        folders.abandon(self.temporary)

    def create_folder(self) -> None:
        """Create the hidden folder that the ranks write into. Collective over all ranks."""
        with self.shared_outcome():
            if self._storage.leads:
                folders.begin(self.temporary)

    def capture(
        self, run: RunParts, *, config: Mapping[str, Any], save_optimizer: bool, save_rng: bool
    ) -> list[Part]:
        """Return this rank's values, as views of the run's tensors; remember all that is not a tensor.

        The caller has the states in memory (`Update.in_memory`) as long as it uses the values.

        Raises:
            CheckpointError: values are not finite, or cannot be saved.
        """
        if not self.temporary.is_dir():
            raise CheckpointError(
                f"{self.temporary}, created by another rank, is not visible here; {_SHARE_THE_FOLDER}"
            )
        values, scalars = _values(run, save_optimizer=save_optimizer)
        _check_finite(values)
        if save_rng:
            values += _rng_parts(self._groups.world.rank)
        manifest = None
        if self._groups.world.rank == 0:
            curve = run.schedule.curve
            manifest = Manifest(
                iteration=self.iteration,
                layout=layout_of(run.groups),
                config=config,
                tensors={},
                optimizer=type(run.engine.update.optimizer).__name__ if save_optimizer else None,
                engine=run.engine.state_dict(),
                schedule={
                    "class": type(curve).__name__,
                    "curve": asdict(curve),
                    **run.schedule.state_dict(),
                },
                training=run.state.state_dict(),
                packages=package_versions(),
            )
        # A copy, because the run continues while it is saved.
        self._shard = _Shard(scalars, set(trained_names(run.model)), deepcopy(manifest), self.shard.name)
        return values

    def collect(self, pieces: list[WrittenPiece], size: int) -> None:
        """Send the description of this rank's shard to the ranks that write a manifest. Collective."""
        send = all_gather_object if self._storage.is_local else gather_object
        self._shards = send(self._groups.control, replace(self._shard, size=size, pieces=pieces))

    def publications(self) -> list[Callable[[], None]]:
        """Return what makes the checkpoint visible, in order. None of it communicates.

        With one folder it is one function, which does nothing except on rank 0. With a folder on each host,
        `latest` may name the checkpoint only when all hosts have renamed theirs, and old ones may be deleted
        only when it does so on all of them.

        They raise:
            CheckpointError: a shard is not visible here, or the shards do not contain whole tensors.
            OSError: the disk is full or the folder cannot be written.
        """
        steps = [self._place, self._announce, self._delete_old]

        def all_steps() -> None:
            for step in steps:
                step()

        if not self._storage.leads:
            return [lambda: None] * (len(steps) if self._storage.is_local else 1)
        return steps if self._storage.is_local else [all_steps]

    def _place(self) -> None:
        """Write the manifest, and rename the folder to its final name."""
        base = self._shards[0].manifest
        assert base is not None, "rank 0 sends the manifest"
        here = {f"shard-{rank:05d}.safetensors" for rank in self._storage.ranks_here}
        manifest = replace(
            base,
            tensors=_records(self._shards, self.temporary, here),
            files={shard.file: shard.size for shard in self._shards},
            optimizer_scalars={
                name: states for shard in self._shards for name, states in shard.scalars.items()
            },
        )
        write_durably(self.temporary / MANIFEST, manifest.to_json())
        folders.place(self.temporary, self.final)
        self._is_placed = True

    def _announce(self) -> None:
        """Let `latest` name the checkpoint."""
        self._is_announced = True
        folders.announce(self.final)

    def _delete_old(self) -> None:
        if self._keep_last is not None:
            folders.keep_newest(self.final.parent, self._keep_last, self.iteration)
        megabytes = sum(shard.size for shard in self._shards) / 1e6
        seconds = time.perf_counter() - self._started
        logger.info("saved %s: %s MB in %.1f s", self.final, f"{megabytes:,.1f}", seconds)


def shard_size(run: RunParts, *, save_optimizer: bool) -> int:
    """Return the size of this rank's shard in bytes, with the random generators' states."""
    with run.engine.update.in_memory():
        values, _ = _values(run, save_optimizer=save_optimizer)
    return plan_shard([*values, *_rng_parts(run.groups.world.rank)]).size


def layout_of(groups: Groups) -> Layout:
    """Return the sizes of a run's parallel groups."""
    return Layout(data=groups.data.size, model=groups.model.size, pipe=groups.pipe.size)


def _values(run: RunParts, *, save_optimizer: bool) -> tuple[list[Part], dict[str, dict[str, Any]]]:
    """Return this rank's weights and optimizer states.

    Returns:
        Views of the run's tensors, and weight name to the optimizer's single-number states.
    """
    update, groups = run.engine.update, run.groups
    parts: list[Part] = []
    scalars: dict[str, dict[str, Any]] = {}
    for fragment in engine_fragments(run.engine):
        if is_written_here(fragment, groups, splits_over_data=update.splits_over_data):
            parts.append(fragment.as_part(fragment.name, shared_weight(fragment, update.optimizer)))
            if save_optimizer:
                states, scalars[fragment.name] = optimizer_parts(fragment, update.optimizer)
                parts += states
        if save_optimizer and is_written_here(fragment, groups, splits_over_data=True):
            parts += replica_parts(fragment, update.optimizer)
    return parts + model_state_parts(run.model_states, groups), scalars


def _check_finite(parts: list[Part]) -> None:
    """Raise an error if weights or states contain values that are not finite.

    Raises:
        CheckpointError: an element is not finite.
    """
    parts = [part for part in parts if part.values.is_floating_point() and part.values.numel()]
    if not parts:
        return
    # Smallest and largest include NaN, and take a thirtieth of the time of `isfinite` on a CPU.
    extremes = [torch.stack(torch.aminmax(part.values)) for part in parts]
    # Read together, with one synchronization.
    are_finite = torch.stack([pair.isfinite().all() for pair in extremes]).tolist()
    broken = [part.name for part, is_finite in zip(parts, are_finite, strict=True) if not is_finite]
    if broken:
        more = f" and {pluralize(len(broken) - 1, 'more tensor')}" if len(broken) > 1 else ""
        raise CheckpointError(
            f"found values that are not finite in {broken[0]}{more}; earlier checkpoints are kept",
            code="not-finite",
        )


def _rng_parts(rank: int) -> list[Part]:
    return [
        Part(
            name=rng_prefix(rank) + name,
            shape=tuple(values.shape),
            block=((0, values.numel()),),
            start=0,
            values=values,
        )
        for name, values in rng_state.capture().items()
    ]


def _records(shards: list[_Shard], folder: Path, here: Collection[str]) -> dict[str, TensorRecord]:
    """Return all ranks' pieces by tensor.

    Args:
        shards: by rank.
        folder: this host's.
        here: names of the shards that must be in it.

    Raises:
        CheckpointError: a shard is not visible here, or the pieces do not form whole tensors.
    """
    for shard in shards:
        path = folder / shard.file
        if shard.file in here and (not path.is_file() or path.stat().st_size != shard.size):
            raise CheckpointError(
                f"{path}, written by another process, is not visible here; {_SHARE_THE_FOLDER}",
                code="not-visible",
            )
    records = records_of(piece for shard in shards for piece in shard.pieces)
    expected = set().union(*(shard.names for shard in shards))
    incomplete = sorted(expected - records.keys()) + [
        name for name, record in records.items() if not record.is_complete
    ]
    if incomplete:
        raise CheckpointError(f"the ranks together do not have all elements of {', '.join(incomplete)}")
    return records
