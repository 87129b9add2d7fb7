"""Load from an object store: download the latest checkpoint into a cache, and load it from there."""

import hashlib
import logging
import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path

from neox_config.facts.checkpoints import MANIFEST
from neox_config.facts.stores import MULTIPART_BYTES, is_url
from neox_launcher.worker.ranks import read_rank
from neox_model.checkpoint import directory as folders
from neox_model.checkpoint.contents import Manifest, Piece
from neox_model.checkpoint.errors import CheckpointError, DamagedCheckpointError
from neox_model.checkpoint.local_shards import agree_on_checkpoint
from neox_model.checkpoint.object_store import PATIENCE_SECONDS, ObjectStore, latest_in
from neox_model.checkpoint.outcome import shared_outcome
from neox_model.checkpoint.shard_file import LENGTH_BYTES, ShardFile, header_stop
from neox_model.checkpoint.shards import ShardReader, write_durably
from neox_model.checkpoint.storage import Storage, folder_lock
from neox_model.checkpoint.stored_types import STORED_TYPES
from neox_model.daemon_threads import in_daemon_thread
from neox_model.parallel.control import all_gather_object
from neox_model.parallel.groups import Groups

__all__ = [
    "cache_folder",
    "checkpoint_folder",
    "download",
    "folder_with_weights",
    "local_folder",
]

_POLL_SECONDS = 0.1
_FOREVER = -1.0
_USE = "downloads to"
# Characters of a URL that a folder name may have.
_OTHER = re.compile(r"[^A-Za-z0-9.-]+")
_ATTEMPTS = 2
# Parts of a file with fewer bytes between them are downloaded as one.
_JOINED_BYTES = 2**20

logger = logging.getLogger(__name__)


def folder_with_weights(
    load: str,
    groups: Groups,
    *,
    cache: str | None,
    storage: Storage | None = None,
    averages: bool = False,
) -> Path:
    """Return the folder to load weights from, for programs that require a checkpoint. Collective.

    Like `local_folder`, but states are not downloaded, unless averages of weights are read, which are states.

    Raises:
        CheckpointError: as `local_folder`; or the store contains no checkpoint.
    """
    folder = local_folder(load, groups, cache=cache, storage=storage, weights_only=not averages)
    if folder is None:
        raise CheckpointError(
            f"{load} contains no checkpoint; set load to where a run uploads them", code="no-checkpoint"
        )
    return folder


def local_folder(
    load: str,
    groups: Groups,
    *,
    cache: str | None,
    name: str | None = None,
    storage: Storage | None = None,
    weights_only: bool = False,
    patience: float = PATIENCE_SECONDS,
) -> Path | None:
    """Return the folder to load from; if `load` is a URL, download a checkpoint. Collective.

    One rank of each host downloads what the host's cache lacks.

    Args:
        load: a folder, or the URL of one in an object store.
        groups: this rank's process groups.
        cache: directory of downloads; None for the default.
        name: the checkpoint to download; None: the latest. Not used for a folder.
        storage: the folders of checkpoints; None: all ranks share one.
        weights_only: download no states of the optimizer and of random generators. Not used for a folder.
        patience: seconds for which an operation that fails is repeated.

    Returns:
        None if the store contains no checkpoint; a folder may contain none.

    Raises:
        CheckpointError: the store cannot be read, or its checkpoint is incomplete or damaged; the same on
            all ranks.
    """
    if not is_url(load):
        if storage is not None and storage.is_local:
            agree_on_checkpoint(Path(load), storage, groups.control)
        return Path(load)
    found: tuple[str, bytes, Path] | None = None
    with shared_outcome(groups.control, f"finding a checkpoint in {load}"):
        if groups.world.rank == 0:
            store = _open(load, patience)
            if name is None:
                chosen = latest_in(store)
            elif (content := store.read(f"{name}/{MANIFEST}")) is not None:
                chosen = name, content
            else:
                raise CheckpointError(
                    f"{load} does not contain {name}; upload it again, or use another store"
                )
            if chosen is not None:
                found = *chosen, checkpoint_folder(load, *chosen, cache=cache, weights_only=weights_only)
    # The choice of rank 0, because another run may save a newer one meanwhile.
    found = all_gather_object(groups.control, found)[0]
    if found is None:
        return None
    name, manifest, folder = found
    me = read_rank()
    task = None
    if me is None or me.local_rank == 0:
        task = in_daemon_thread(
            lambda: download(_open(load, patience), name, manifest, folder, weights_only=weights_only)
        )
    # Not one collective that waits for the download, which may take longer than collectives may.
    while not all(all_gather_object(groups.control, task is None or task.done())):
        time.sleep(_POLL_SECONDS)
    with shared_outcome(groups.control, f"downloading {load}/{name}"):
        if task is not None:
            task.result()
    return folder


def checkpoint_folder(
    url: str, name: str, manifest: bytes, *, cache: str | None, weights_only: bool = False
) -> Path:
    """Return the folder in the cache of one checkpoint alone, whose `latest` therefore never changes.

    A download of the weights alone has another folder, because states cannot be loaded from it.

    Args:
        url: URL of a folder in an object store.
        name: the checkpoint.
        manifest: its manifest, which contains the checksums of all data.
        cache: directory of the downloads from all URLs; None for the default.
        weights_only: for the weights alone.
    """
    suffix = "-weights" if weights_only else ""
    return cache_folder(url, cache) / f"{name}-{_digest(manifest)}{suffix}"


def cache_folder(url: str, cache: str | None) -> Path:
    """Return the folder for all downloads from a URL, in the given cache or the default one."""
    url = url.rstrip("/")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "neox-checkpoints"
    folder = f"{_OTHER.sub('-', url)[-100:]}-{_digest(url.encode())}"
    return (Path(cache) if cache else home).absolute() / folder


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _open(url: str, patience: float) -> ObjectStore:
    return ObjectStore(url, chunk_bytes=MULTIPART_BYTES, patience=patience)


def download(
    store: ObjectStore, name: str, manifest: bytes, folder: Path, *, weights_only: bool = False
) -> None:
    """Download a checkpoint, unless the folder has it undamaged.

    Files that an interrupted download has left are used if their checksums fit. With `weights_only` they have
    the sizes that the manifest records, and zeros where states would be.

    Args:
        store: where it is.
        name: the checkpoint.
        manifest: its manifest.
        folder: local folder for this checkpoint alone, created if missing.
        weights_only: download the weights alone.

    Raises:
        CheckpointError: the store cannot be read, or the checkpoint in it is damaged.
        OSError: the folder cannot be written.
    """
    final = folder / name
    # Verified without the lock, which another job on this host may be waiting for.
    if final.exists() and _is_sound(final, manifest, weights_only):
        return
    with ExitStack() as held:
        try:
            held.enter_context(folder_lock(folder, patience=0.0, use=_USE))
        except CheckpointError:
            logger.info("waiting for another process that downloads to %s", folder)
            held.enter_context(folder_lock(folder, patience=_FOREVER, use=_USE))
        temporary = folders.unfinished(final)
        if final.exists():
            if _is_sound(final, manifest, weights_only):
                return
            logger.warning("%s is damaged: downloading what is damaged again", final)
            folders.withdraw(final)
        temporary.mkdir(exist_ok=True)
        (temporary / MANIFEST).unlink(missing_ok=True)
        write_durably(temporary / MANIFEST, manifest.decode(errors="replace"))
        _fetch_shards(store, name, temporary, weights_only)
        folders.publish(temporary, final)
        logger.info("downloaded %s/%s to %s", store.url, name, final)


def _is_sound(final: Path, manifest: bytes, weights_only: bool) -> bool:
    try:
        if (final / MANIFEST).read_bytes() != manifest:
            return False
        contents = Manifest.read(final)
    except (FileNotFoundError, DamagedCheckpointError):
        return False
    wanted = _pieces(contents, weights_only)
    return all(_damage(final, contents, file, pieces) is None for file, pieces in wanted.items())


def _pieces(manifest: Manifest, weights_only: bool) -> dict[str, list[tuple[Piece, str]]]:
    """Return the pieces in each file, those of weights or of all tensors, with their dtypes."""
    pieces: dict[str, list[tuple[Piece, str]]] = {file: [] for file in manifest.files}
    for name in manifest.weight_names if weights_only else manifest.tensors:
        record = manifest.tensors[name]
        for piece in record.pieces:
            pieces[piece.file].append((piece, record.dtype))
    return pieces


def _fetch_shards(store: ObjectStore, name: str, folder: Path, weights_only: bool) -> None:
    """Download the shards, or their weights, that are not in the folder, and verify the checksums of all."""
    manifest = Manifest.read(folder)
    wanted = _pieces(manifest, weights_only)
    size = sum(piece.numel * STORED_TYPES[dtype].itemsize for piece, dtype in chain(*wanted.values()))
    what = ", the weights alone" if weights_only else ""
    logger.info("downloading %s/%s: %.2f GB%s", store.url, name, size / 1e9, what)
    for number, (file, held) in enumerate(wanted.items(), 1):
        path, attempts = folder / file, 0
        while (damage := _damage(folder, manifest, file, held)) is not None:
            if attempts == _ATTEMPTS:
                raise CheckpointError(f"{store.url}/{name}, downloaded {attempts} times: {damage}")
            attempts += 1
            if not weights_only:
                store.download(f"{name}/{file}", path)
                continue
            store.download(f"{name}/{file}", path, [(0, LENGTH_BYTES)])
            store.download(f"{name}/{file}", path, [(LENGTH_BYTES, header_stop(path))])
            # Damage is found when the pieces are verified.
            with suppress(DamagedCheckpointError):
                spans = map(ShardFile(path, manifest.files[file]).span, (piece.key for piece, _ in held))
                store.download(f"{name}/{file}", path, _joined(spans))
        logger.info("file %d of %d is there", number, len(wanted))


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges of bytes in their order, those with few bytes between them as one."""
    joined: list[tuple[int, int]] = []
    for first, stop in sorted(spans):
        if joined and first - joined[-1][1] < _JOINED_BYTES:
            first, previous = joined.pop()
            stop = max(stop, previous)
        joined.append((first, stop))
    return joined


def _damage(folder: Path, manifest: Manifest, file: str, pieces: Sequence[tuple[Piece, str]]) -> str | None:
    """Return what is wrong with a file, or with pieces in it, given with their dtypes; None if nothing is."""
    try:
        ShardFile(folder / file, manifest.files[file])
        ShardReader(folder, manifest).check_pieces(pieces)
    except DamagedCheckpointError as error:
        return str(error)
    return None
