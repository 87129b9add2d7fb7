"""The program that uploads one checkpoint to an object store, in a separate process at the lowest priority.

It ends when its standard input closes, that is, with the run that started it. Its standard output is the
reason of a failure.
"""

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import click

from neox_config.errors import NeoXError
from neox_config.facts.checkpoints import LATEST, MANIFEST
from neox_config.log import configure_logging
from neox_launcher.protocol.stop_signals import STOP_SIGNALS
from neox_model.checkpoint import directory as folders
from neox_model.checkpoint import priority
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.object_store import ObjectStore
from neox_model.checkpoint.store_claim import check_owner

__all__ = ["main", "upload"]


def upload(folder: Path, store: ObjectStore, *, owner: str | None = None) -> None:
    """Upload a complete checkpoint: its shards, then its manifest, then `latest`.

    What the store has under the same name is kept if it has the same manifest, which contains the checksums
    of all data; otherwise it is incomplete, without a manifest, until everything is replaced.

    Args:
        folder: the checkpoint. If it is deleted or replaced meanwhile, the upload fails; it never mixes two.
        store: where to upload it.
        owner: what `claim_store` returned for the store; None: other runs are not looked for.

    Raises:
        CheckpointError: the store cannot be written to, or another run uploads to it.
        OSError: the checkpoint cannot be read, or was deleted.
    """

    def check() -> None:
        if owner is not None:
            check_owner(store, owner)

    check()
    name = folders.final_name(folder)
    with _held(folder) as source:
        with source(MANIFEST) as file:
            manifest = file.read()
        if store.read(f"{name}/{MANIFEST}") != manifest:
            store.delete(f"{name}/{MANIFEST}")
            for shard, size in json.loads(manifest)["contents"]["files"].items():
                with source(shard) as file:
                    found = os.fstat(file.fileno()).st_size
                    if found != size:
                        raise CheckpointError(
                            f"{folder / shard} is damaged: it has {found:,} bytes instead of {size:,}"
                        )
                    store.write(f"{name}/{shard}", file)
                check()
            store.write(f"{name}/{MANIFEST}", io.BytesIO(manifest))
    store.write(LATEST, io.BytesIO(f"{name}\n".encode()))


@contextmanager
def _held(folder: Path) -> Iterator[Callable[[str], BinaryIO]]:
    """Yield a function that opens files of a folder, even after the folder was renamed."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def source(name: str) -> BinaryIO:
        return os.fdopen(os.open(name, os.O_RDONLY, dir_fd=descriptor), "rb")

    try:
        yield source
    finally:
        os.close(descriptor)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("url")
@click.option("--chunk-bytes", type=int, required=True)
@click.option("--patience", type=float, required=True)
@click.option("--owner")
def main(folder: Path, url: str, chunk_bytes: int, patience: float, owner: str | None) -> None:
    """Upload the checkpoint FOLDER to the store URL."""
    for number in STOP_SIGNALS:  # They stop the run, which decides when an upload ends.
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    configure_logging(None)
    priority.lower(0)
    try:
        upload(folder, ObjectStore(url, chunk_bytes=chunk_bytes, patience=patience), owner=owner)
    except (NeoXError, OSError) as error:
        click.echo(str(error))
        sys.exit(1)


def _end_with_parent() -> None:
    """Wait until the standard input closes, and end this process."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
