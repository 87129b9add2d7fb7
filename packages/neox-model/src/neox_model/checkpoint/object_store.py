"""A folder of checkpoints in an object store, reached through fsspec.

It has the same files as a local folder of checkpoints: `latest`, and the manifest and shards of each
checkpoint. Objects cannot be renamed together, so the order of writing replaces the rename: a checkpoint
without its manifest is incomplete, and `latest` names only complete ones.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from neox_config.atomic import flush_file
from neox_config.facts.checkpoints import LATEST, MANIFEST, iteration_of
from neox_config.facts.stores import BUCKET_PACKAGES, scheme_of
from neox_model.checkpoint.errors import CheckpointError, quoted

__all__ = ["PATIENCE_SECONDS", "ObjectStore", "latest_in"]

PATIENCE_SECONDS = 120.0
"""How long an operation that fails is repeated."""

_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
_COPIED_BYTES = 2**20
# Of one request for a part of an object, which is held in memory.
_REQUESTED_BYTES = 2**24
# Limit of S3.
_MOST_PARTS = 10_000

logger = logging.getLogger(__name__)


class ObjectStore:
    """A folder of checkpoints at a URL.

    Operations that fail are repeated, with growing pauses.

    Args:
        url: URL of the folder, of a kind that fsspec knows.
        chunk_bytes: bytes of each part of an upload.
        patience: seconds for which an operation is repeated.

    Raises:
        CheckpointError: fsspec does not know this kind of URL, or lacks a package for it.
    """

    def __init__(self, url: str, *, chunk_bytes: int, patience: float = PATIENCE_SECONDS) -> None:
        self.url = url.rstrip("/")
        self._chunk_bytes, self._patience = chunk_bytes, patience
        try:
            # A stored listing would hide what another process has written.
            options = {"use_listings_cache": False} if scheme_of(url) in BUCKET_PACKAGES else {}
            self._system, self._root = fsspec.url_to_fs(self.url, **options)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"cannot open {url}: {error}; correct the URL, or install the package of this kind of store",
                code="not-openable",
            ) from error
        self._root = self._root.rstrip("/")
        self._has_folders = scheme_of(url) not in BUCKET_PACKAGES

    def read(self, name: str) -> bytes | None:
        """Return the contents of an object; None if it does not exist.

        Raises:
            CheckpointError: it could not be read.
        """
        try:
            content: bytes = self._repeat(
                f"reading {self.url}/{name}", self._system.cat_file, self._path(name)
            )
        except FileNotFoundError:
            return None
        return content

    def write(self, name: str, source: BinaryIO) -> None:
        """Write an object, which appears whole or not at all.

        Args:
            name: the object, relative to the folder.
            source: its contents, from the beginning.

        Raises:
            CheckpointError: it could not be written.
        """
        action = f"writing {self.url}/{name}"
        send = self._send_file if self._has_folders else self._send_object
        try:
            self._repeat(action, send, self._path(name), source)
        except FileNotFoundError as error:
            raise CheckpointError(f"{action} failed: {error}; check the URL") from error

    def _send_file(self, path: str, source: BinaryIO) -> None:
        self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self._system.open(f"{path}.new", "wb") as target:
            _send_blocks(source, target)
        self._system.mv(f"{path}.new", path)

    def _send_object(self, path: str, source: BinaryIO) -> None:
        """Upload in parts, and complete the object only after the last one."""
        size = source.seek(0, os.SEEK_END)
        chunk_bytes = max(self._chunk_bytes, -(-size // _MOST_PARTS))
        target = self._system.open(path, "wb", block_size=chunk_bytes, autocommit=False)
        try:
            _send_blocks(source, target)
            target.close()
            target.commit()
        except BaseException:
            # Otherwise its finalizer would upload what it still holds.
            target.closed = True
            target.discard()
            raise

    def download(self, name: str, path: Path, ranges: Iterable[tuple[int, int]] | None = None) -> None:
        """Download an object, or parts of it, into a file, which gets the object's size.

        Other bytes of the file stay as they are; new ones are zero, and occupy no disk space where the file
        system allows it.

        Args:
            name: the object, relative to the folder.
            path: the file, created if missing.
            ranges: first byte of each part, and the one after its last; bytes after the end of the object are
                ignored. None: all of it.

        Raises:
            CheckpointError: it does not exist, or could not be read.
            OSError: the file cannot be written.
        """
        action = f"downloading {self.url}/{name}"
        path.touch()
        try:
            with path.open("r+b") as file:
                size = self._repeat(action, lambda: int(self._system.info(self._path(name))["size"]))
                file.truncate(size)
                for start, end in [(0, size)] if ranges is None else ranges:
                    for first in range(start, min(end, size), _REQUESTED_BYTES):
                        stop = min(first + _REQUESTED_BYTES, end, size)
                        content = self._repeat(action, self._part, name, first, stop)
                        file.seek(first)
                        file.write(content)
                flush_file(file)
        except FileNotFoundError as error:
            raise CheckpointError(f"{action} failed: it does not exist") from error

    def _part(self, name: str, first: int, stop: int) -> bytes:
        content: bytes = self._system.cat_file(self._path(name), start=first, end=stop)
        if len(content) != stop - first:
            raise OSError(f"{len(content):,} bytes were received instead of {stop - first:,}")
        return content

    def delete(self, name: str) -> None:
        """Delete an object, if it exists.

        Raises:
            CheckpointError: it could not be deleted.
        """
        with suppress(FileNotFoundError):
            self._repeat(f"deleting {self.url}/{name}", self._system.rm_file, self._path(name))

    def complete_checkpoints(self) -> list[str]:
        """Return the names of the complete checkpoints, lowest iteration first.

        Raises:
            CheckpointError: the store could not be read.
        """
        action = f"listing {self.url}"
        try:
            paths = self._repeat(action, lambda: self._system.ls(self._root, detail=False, refresh=True))
        except FileNotFoundError:
            return []
        names = (path.rstrip("/").rpartition("/")[2] for path in paths)
        numbered = [(number, name) for name in names if (number := iteration_of(name)) is not None]
        return [
            name
            for _, name in sorted(numbered)
            if self._repeat(action, self._system.exists, self._path(f"{name}/{MANIFEST}"))
        ]

    def check_bucket(self) -> None:
        """Check that the bucket exists, because its absence looks like the absence of an object.

        Raises:
            CheckpointError: it does not exist.
        """
        if self._has_folders:
            return
        bucket = self._root.lstrip("/").partition("/")[0]
        try:
            # Listing would read the names of all of its objects.
            self._repeat(f"reading {bucket}", self._system.info, bucket)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.url}: the bucket {bucket!r} does not exist; create it, or correct the URL"
            ) from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _repeat(self, action: str, attempt: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of an operation; repeat it while it fails, with pauses that double.

        An object that does not exist, and a refused permission, are not tried again.
        """
        pause, left = _FIRST_PAUSE_SECONDS, self._patience
        while True:
            try:
                return attempt(*arguments)
            except (FileNotFoundError, CheckpointError):
                raise
            except Exception as error:  # Every kind of store has its own exceptions.
                reason = f"{type(error).__name__}: {error}"
                if left <= 0 or isinstance(error, PermissionError):
                    raise CheckpointError(f"{action} failed: {reason}") from error
            pause = min(pause, left, _LONGEST_PAUSE_SECONDS)
            logger.warning("%s failed: %s; trying again in %g s", action, reason, pause)
            time.sleep(pause)
            pause, left = 2 * pause, left - pause


def latest_in(store: ObjectStore) -> tuple[str, bytes] | None:
    """Return the name and manifest of the checkpoint that `latest` names, None if there is no checkpoint.

    Raises:
        CheckpointError: the bucket does not exist; or there are checkpoints, but `latest` does not name a
            complete one.
    """
    content = store.read(LATEST)
    name = None if content is None else content.decode(errors="replace").strip()
    if name is not None and iteration_of(name) is not None:
        manifest = store.read(f"{name}/{MANIFEST}")
        if manifest is not None:
            return name, manifest
    complete = store.complete_checkpoints()
    if name is None and not complete:
        store.check_bucket()
        return None
    what = "is missing" if name is None else f"names {quoted(name)!r}, which is not a complete checkpoint"
    offer = f"write {complete[-1]} into it to load that checkpoint" if complete else "there is none"
    raise CheckpointError(f"{store.url}/{LATEST} {what}; if no upload is running, {offer}")


def _send_blocks(source: BinaryIO, target: BinaryIO) -> None:
    source.seek(0)
    while True:
        try:
            block = source.read(_COPIED_BYTES)
        except OSError as error:  # Of the local file: repeating does not fix it.
            raise CheckpointError(f"{getattr(source, 'name', 'a local file')}: {error}") from error
        if not block:
            return
        target.write(block)
