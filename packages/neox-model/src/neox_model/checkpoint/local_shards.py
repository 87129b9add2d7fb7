"""Load checkpoints whose shards are on the local disks of several hosts.

Every host has the manifest, and the shards that its ranks wrote. The hosts first agree on a checkpoint of
which all shards exist somewhere. After each rank knows which shards it reads, those that its host lacks are
copied into its folder, over the process group.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed

from neox_config.atomic import atomic_write, flush_file, flush_folder, written_aside
from neox_config.facts.checkpoints import LATEST, MANIFEST, complete_checkpoints, iteration_of
from neox_config.pluralize import first_few, pluralize
from neox_model.checkpoint import directory as folders
from neox_model.checkpoint.contents import Manifest, manifest_sha256
from neox_model.checkpoint.errors import CheckpointError, quoted
from neox_model.checkpoint.outcome import shared_outcome
from neox_model.checkpoint.storage import Storage
from neox_model.parallel.control import all_gather_object
from neox_model.parallel.groups import Group

__all__ = ["Copy", "Inventory", "agree_on_checkpoint", "choose", "copy_missing"]

_CHUNK_BYTES = 2**26
_MOST_NAMED = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Copy:
    """What one host has of a checkpoint.

    Args:
        folder: name of its folder, which differs from the checkpoint's if it was being replaced.
        needed: names of all shards, from its manifest.
        present: those that are here with their whole size.
    """

    folder: str
    needed: frozenset[str]
    present: frozenset[str]


@dataclass(frozen=True, slots=True)
class Inventory:
    """The checkpoints on one host.

    Args:
        host: its name.
        latest: the checkpoint that its file `latest` names; None if there is no such file.
        copies: by name of the checkpoint and digest of its manifest.
    """

    host: str
    latest: str | None = None
    copies: Mapping[tuple[str, str], Copy] = field(default_factory=dict)


def agree_on_checkpoint(directory: Path, storage: Storage, control: Group) -> None:
    """Let `latest` on every host name the same checkpoint, with the same manifest. Collective.

    Does nothing if no host has a checkpoint.

    Args:
        directory: folder of the checkpoints, on each host.
        storage: which ranks share a folder.
        control: CPU group of all ranks.

    Raises:
        CheckpointError: shards of the latest checkpoint are on no host; the same on all ranks.
    """
    mine = None
    with shared_outcome(control, f"finding a checkpoint in {directory} of each host"):
        if storage.leads:
            mine = _inventory(directory, storage.name)
    found = {rank: each for rank, each in enumerate(all_gather_object(control, mine)) if each is not None}
    chosen = choose(directory, list(found.values()))
    if chosen is None:
        return
    holder = next(rank for rank, each in found.items() if chosen in each.copies)
    name, _ = chosen
    manifest = None
    with shared_outcome(control, f"reading {directory / name}"):
        if storage.rank == holder:
            copy = directory / found[holder].copies[chosen].folder
            manifest = (copy / MANIFEST).read_text(encoding="utf-8")
    manifest = all_gather_object(control, manifest)[holder]
    with shared_outcome(control, f"preparing {directory / name} on each host"):
        if storage.leads:
            _install(directory, chosen, manifest, found[storage.rank])


def choose(directory: Path, hosts: Sequence[Inventory]) -> tuple[str, str] | None:
    """Return the name, and digest of the manifest, of the latest checkpoint that `latest` names on a host.

    Raises:
        CheckpointError: `latest` names no checkpoint, or shards are on no host.
    """
    named = {each.latest for each in hosts if each.latest is not None}
    copies = [key for each in hosts for key in each.copies]
    if not named and not copies:
        return None
    name = max(named or {key[0] for key in copies}, key=lambda one: (iteration_of(one) or -1, one))
    if len(named) > 1:
        listed = "; ".join(f"{each.latest} on {each.host}" for each in hosts)
        logger.warning("%s differs between hosts (%s): using %s", directory / LATEST, listed, name)
    candidates = list(dict.fromkeys(key for key in copies if key[0] == name))
    for key in candidates:
        if not _lost(key, hosts):
            return key
    raise CheckpointError(_description(directory, name, candidates, hosts))


def copy_missing(
    folder: Path, files: Mapping[str, int], wanted: Collection[str], storage: Storage, control: Group
) -> None:
    """Copy the shards that ranks read and their hosts lack into the checkpoint's folder. Collective.

    Args:
        folder: the checkpoint, on each host.
        files: shard name to size in bytes, from the manifest.
        wanted: names of the shards that this rank reads.
        storage: which ranks share a folder.
        control: CPU group of all ranks.

    Raises:
        CheckpointError: a shard is on no host, or cannot be read or written; the same on all ranks.
    """
    if len(storage.leaders) == 1:
        return
    mine = frozenset[str](), frozenset(wanted)
    with shared_outcome(control, f"reading {folder}"):
        if storage.leads:
            mine = _present(folder, files), mine[1]
    items = all_gather_object(control, mine)
    here = {rank: items[rank][0] for rank in storage.leaders}
    # By shard that is missing somewhere: the leader of the first host that has it, then those that lack it.
    found: dict[str, list[int]] = {}
    for rank, (_, reads) in enumerate(items):
        leader = storage.names.index(storage.names[rank])
        for file in reads - here[leader]:
            ranks = found.setdefault(file, [each for each in here if file in here[each]][:1])
            if not ranks:
                raise CheckpointError(
                    f"no host has {file} of this checkpoint; resume from another checkpoint"
                )
            if leader not in ranks:
                ranks.append(leader)
    for file, receivers in sorted(found.items()):
        holder, *others = receivers
        if storage.rank == holder:
            logger.info("sending %s to %s", folder / file, pluralize(len(others), "host"))
        _copy(folder / file, files[file], holder, others, storage, control)


def _copy(
    path: Path, size: int, holder: int, receivers: Sequence[int], storage: Storage, control: Group
) -> None:
    """Copy one file from a host to others. Collective over all ranks."""
    action = f"copying {path} from {storage.names[holder]}"
    with ExitStack() as received:
        aside = None
        with shared_outcome(control, action):
            if storage.rank in receivers:
                aside = received.enter_context(written_aside(path))
        # Both sides exchange all chunks whatever fails, so that they may communicate in this block.
        with shared_outcome(control, action):
            if storage.rank in (holder, *receivers):
                sends = storage.rank == holder
                chunks = _chunks(size, holder, receivers, sends=sends, control=control)
                _read_or_write(aside or path, chunks, reads=sends)
        # Only now is it known that the file was sent whole.
        with shared_outcome(control, action):
            received.close()


def _inventory(directory: Path, host: str) -> Inventory:
    latest = None
    if (directory / LATEST).exists():
        latest = (directory / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    replaced = [each for each in directory.glob(".*.replaced") if (each / MANIFEST).is_file()]
    copies: dict[tuple[str, str], Copy] = {}
    # A new checkpoint that is whole is preferred to the one that it replaces.
    for folder in [*complete_checkpoints(directory), *replaced]:
        try:
            files = Manifest.read(folder).files
        except CheckpointError as error:
            logger.warning("%s is not used: %s", folder, error)
            continue
        key = folders.final_name(folder), manifest_sha256(folder) or ""
        # The first one is kept, which is the preferred one.
        copies.setdefault(key, Copy(folder.name, frozenset(files), _present(folder, files)))
    return Inventory(host, latest, copies)


def _present(folder: Path, files: Mapping[str, int]) -> frozenset[str]:
    """Return the shards that are in a folder with their whole size."""
    return frozenset(
        name
        for name, size in files.items()
        if (folder / name).is_file() and (folder / name).stat().st_size == size
    )


def _lost(key: tuple[str, str], hosts: Sequence[Inventory]) -> set[str]:
    """Return the shards of a checkpoint that no host has."""
    held = [each.copies[key] for each in hosts if key in each.copies]
    return set(held[0].needed).difference(*(copy.present for copy in held))


def _description(
    directory: Path, name: str, candidates: Sequence[tuple[str, str]], hosts: Sequence[Inventory]
) -> str:
    """Return the message for a checkpoint that is not whole: its missing shards, and hosts that lack it."""
    lost = min((sorted(_lost(key, hosts)) for key in candidates), key=len, default=[])
    without = [each.host for each in hosts if not any(key in each.copies for key in candidates)]
    text = f"{directory / quoted(name)} is not whole on the hosts {', '.join(each.host for each in hosts)}"
    if lost:
        text += f": no host has {first_few(lost, _MOST_NAMED)}"
    if without:
        text += f"; {', '.join(without)} has nothing of it: is its disk lost, or are these other hosts?"
    return (
        f"{text}; add the hosts that have them, or, to go back, write the name of an older checkpoint into "
        f"{directory / LATEST} on every host"
    )


def _install(directory: Path, chosen: tuple[str, str], manifest: str, found: Inventory) -> None:
    """Let `latest` name a checkpoint, whose manifest is in its folder.

    Nothing is written on a host that has it: another program may read while a run saves.
    """
    name, digest = chosen
    final, copy = directory / name, found.copies.get(chosen)
    if copy is None:
        if (final / MANIFEST).exists():
            raise CheckpointError(
                f"{final} on this host is another checkpoint than on the other hosts; move it away, if it "
                "belongs to another run"
            )
        final.mkdir(parents=True, exist_ok=True)
        with atomic_write(final / MANIFEST, is_durable=True) as file:
            file.write(manifest)
    elif copy.folder != name:
        # Of a folder that hosts share, another host may have restored it.
        if manifest_sha256(final) not in (None, digest):
            folders.abandon(final)
        folders.restore(final)
    flush_folder(directory)
    if found.latest != name:
        folders.point_latest(directory, name)


def _chunks(
    size: int, holder: int, receivers: Sequence[int], *, sends: bool, control: Group
) -> Iterator[memoryview]:
    """Yield memory for the chunks of a file: received from its holder before, or sent to receivers after."""
    for start in range(0, size, _CHUNK_BYTES):
        chunk = torch.zeros(min(_CHUNK_BYTES, size - start), dtype=torch.uint8)
        if not sends:
            torch.distributed.recv(chunk, src=holder, group=control.process_group)
        yield memoryview(chunk.numpy())  # type: ignore[arg-type]
        for receiver in receivers if sends else ():
            torch.distributed.send(chunk, dst=receiver, group=control.process_group)


def _read_or_write(path: Path, chunks: Iterator[memoryview], *, reads: bool) -> None:
    """Read a file into chunks that are sent, or write those that are received to one.

    After an error the others are exchanged with any contents, because the other side waits for them.
    """
    try:
        with path.open("rb" if reads else "wb") as file:
            for chunk in chunks:
                if not reads:
                    file.write(chunk)
                elif file.readinto(chunk) != len(chunk):  # type: ignore[attr-defined]
                    raise CheckpointError(f"{path} is truncated")
            if not reads:
                flush_file(file)
    finally:
        for _ in chunks:
            pass
