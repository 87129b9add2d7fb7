"""Load from an object store: download the latest checkpoint into a cache, and load it from there."""

import hashlib
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock

from neox_config.facts.checkpoints import LATEST, MANIFEST, iteration_of
from neox_config.facts.stores import MULTIPART_BYTES, is_url
from neox_launcher.worker.ranks import read_rank
from neox_model.checkpoint import directory as folders
from neox_model.checkpoint.contents import Manifest, Piece
from neox_model.checkpoint.errors import CheckpointError, DamagedCheckpointError, quoted
from neox_model.checkpoint.object_store import PATIENCE_SECONDS, ObjectStore
from neox_model.checkpoint.outcome import gather, shared_outcome
from neox_model.checkpoint.shards import ShardReader, write_durably
from neox_model.parallel.groups import Groups

__all__ = ["cache_folder", "download", "folder_with_weights", "local_folder"]

_POLL_SECONDS = 0.1
_LOCK = ".lock"
# Characters of a URL that a folder name may have.
_OTHER = re.compile(r"[^A-Za-z0-9.-]+")
_ATTEMPTS = 2
_ABSENT = "it is absent"


def folder_with_weights(load: str, groups: Groups, *, cache: str | None) -> Path:
    """Return the folder to load from like `local_folder`, for programs that require a checkpoint. Collective.

    Raises:
        CheckpointError: as `local_folder`; or the store contains no checkpoint.
    """
    folder = local_folder(load, groups, cache=cache)
    if folder is None:
        raise CheckpointError(f"{load} contains no checkpoint; set load to where a training uploads them")
    return folder


def local_folder(
    load: str, groups: Groups, *, cache: str | None, patience: float = PATIENCE_SECONDS
) -> Path | None:
    """Return the folder to load from; if `load` is a URL, download the latest checkpoint. Collective.

    One rank of each host downloads what the host's cache lacks.

    Args:
        load: a folder, or the URL of one in an object store.
        groups: this rank's process groups.
        cache: directory of downloads; None for the default.
        patience: seconds for which an operation that fails is repeated.

    Returns:
        None if the store contains no checkpoint; a folder may contain none.

    Raises:
        CheckpointError: the store cannot be read, or its checkpoint is incomplete or damaged; the same on
            all ranks.
    """
    if not is_url(load):
        return Path(load)
    found: tuple[str, Path] | None = None
    with shared_outcome(groups.control, f"finding a checkpoint in {load}"):
        if groups.world.rank == 0:
            name = _latest(_open(load, patience))
            found = None if name is None else (name, cache_folder(load, cache))
    # The choice of rank 0, because another training may save a newer one meanwhile.
    found = gather(groups.control, found)[0]
    if found is None:
        return None
    name, folder = found
    me = read_rank()
    with ThreadPoolExecutor(1) as background:
        task = None
        if me is None or me.local_rank == 0:
            task = background.submit(lambda: download(_open(load, patience), name, folder))
        # Not one collective that waits for the download, which may take longer than collectives may.
        while not all(gather(groups.control, task is None or task.done())):
            time.sleep(_POLL_SECONDS)
    with shared_outcome(groups.control, f"downloading {load}/{name}"):
        if task is not None:
            task.result()
    return folder


def cache_folder(url: str, cache: str | None) -> Path:
    """Return the folder for downloads from a URL.

    Args:
        url: URL of a folder in an object store.
        cache: directory of the downloads from all URLs; None for the default.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "neox-checkpoints"
    digest = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:12]
    return (Path(cache) if cache else home).absolute() / f"{_OTHER.sub('-', url.rstrip('/'))[-100:]}-{digest}"


def _open(url: str, patience: float) -> ObjectStore:
    return ObjectStore(url, chunk_bytes=MULTIPART_BYTES, patience=patience)


def _latest(store: ObjectStore) -> str | None:
    """Return the name of the checkpoint that `latest` names, None if the store contains no checkpoint.

    Raises:
        CheckpointError: there are checkpoints, but `latest` does not name a complete one.
    """
    content = store.read(LATEST)
    name = None if content is None else content.decode(errors="replace").strip()
    if name is not None and iteration_of(name) is not None and store.read(f"{name}/{MANIFEST}") is not None:
        return name
    complete = store.complete_checkpoints()
    if name is None and not complete:
        return None
    what = "is missing" if name is None else f"names {quoted(name)!r}, which is not a complete checkpoint"
    offer = f"write {complete[-1]} into it to load that checkpoint" if complete else "there is none"
    raise CheckpointError(f"{store.url}/{LATEST} {what}; if no upload is running, {offer}")


def download(store: ObjectStore, name: str, folder: Path) -> None:
    """Download a checkpoint, unless the folder has it, and point the folder's `latest` at it.

    Files that an interrupted download has left are used if their checksums fit.

    Args:
        store: where it is.
        name: the checkpoint.
        folder: local folder of checkpoints, created if missing.

    Raises:
        CheckpointError: the store cannot be read, or the checkpoint in it is damaged.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / _LOCK, fallback_to_soft=False):
        content = store.read(f"{name}/{MANIFEST}")
        if content is None:
            raise CheckpointError(f"{store.url}/{name} was deleted or replaced meanwhile; start again")
        final = folder / name
        temporary = folders.unfinished(final)
        if not _has(final, content):
            temporary.mkdir(exist_ok=True)
            (temporary / MANIFEST).unlink(missing_ok=True)
            write_durably(temporary / MANIFEST, content.decode(errors="replace"))
            _fetch_shards(store, name, temporary)
            folders.publish(temporary, final)
        else:
            folders.point_latest(folder, name)


def _has(final: Path, manifest: bytes) -> bool:
    try:
        return (final / MANIFEST).read_bytes() == manifest
    except FileNotFoundError:
        return False


def _fetch_shards(store: ObjectStore, name: str, folder: Path) -> None:
    """Download the shards that are not in the folder, and verify the checksums of all."""
    manifest = Manifest.read(folder)
    pieces: dict[str, list[tuple[Piece, str]]] = {file: [] for file in manifest.files}
    for record in manifest.tensors.values():
        for piece in record.pieces:
            pieces[piece.file].append((piece, record.dtype))
    for file, held in pieces.items():
        damage = _damage(folder, manifest, held) if (folder / file).exists() else _ABSENT
        attempts = 0
        while damage is not None:
            if attempts == _ATTEMPTS:
                raise CheckpointError(f"{store.url}/{name}, downloaded {attempts} times: {damage}")
            store.download(f"{name}/{file}", folder / file)
            damage, attempts = _damage(folder, manifest, held), attempts + 1


def _damage(folder: Path, manifest: Manifest, pieces: Sequence[tuple[Piece, str]]) -> str | None:
    """Return what is wrong with the pieces of one file, with their dtypes; None if nothing is."""
    reader = ShardReader(folder, manifest.files)
    try:
        for piece, dtype in pieces:
            reader.read(piece, dtype)
    except DamagedCheckpointError as error:
        return str(error)
    return None
