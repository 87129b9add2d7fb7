"""Claim an object store for the uploads of one run, and check at its start that it can be written to.

Each start of a run writes a new random number into the object `.owner` of the store, and before into a
file of the same name in `save`, after which the store may have this number or the one before. An upload is
refused if the store's number is another one. A run may claim a store that contains checkpoints only if
they are its own: its `save` contains the store's number or the store's latest checkpoint, or that checkpoint
is the one that it continues from.
"""

import io
import logging
import secrets
from pathlib import Path

from neox_config.atomic import atomic_write
from neox_config.facts.checkpoints import MANIFEST, complete_checkpoints, iteration_of
from neox_config.facts.stores import MULTIPART_BYTES, is_url
from neox_model.checkpoint.directory import find_latest
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.object_store import ObjectStore, latest_in

__all__ = ["OWNER", "check_owner", "claim_store", "warn_of_newer"]

OWNER = ".owner"
"""Object of a store with the number of the run that uploads; file in `save` with the last numbers."""

_PATIENCE_SECONDS = 5.0
_DIGITS = 32

logger = logging.getLogger(__name__)


def claim_store(url: str, save: Path, *, load: str | None, patience: float = _PATIENCE_SECONDS) -> str:
    """Reserve a store for the uploads from a folder; return the number with which they are made.

    Args:
        url: URL of a folder in an object store.
        save: folder of the checkpoints; this process holds its lock.
        load: folder or URL of the checkpoint that the run continues; None: it does not continue one.
        patience: seconds for which an operation that fails is repeated.

    Raises:
        CheckpointError: the store cannot be read or written, or contains checkpoints of another run.
        OSError: a folder cannot be read or written.
    """
    try:
        store = ObjectStore(url, chunk_bytes=MULTIPART_BYTES, patience=patience)
        found = store.read(OWNER)
        # The last number that was written, and the one that the store had before.
        numbers = (save / OWNER).read_bytes().split() if (save / OWNER).exists() else []
        if found is None or found not in numbers:
            _refuse_checkpoints_of_others(store, save, load)
        number = secrets.token_hex(_DIGITS // 2)
        before = "" if found is None else found.decode(errors="replace")
        with atomic_write(save / OWNER, is_durable=True) as file:
            file.write(f"{number}\n{before}\n")
        store.write(OWNER, io.BytesIO(number.encode()))
    except CheckpointError as error:
        raise CheckpointError(
            f"checkpoints cannot be uploaded to {url}: {error}", code="store-of-another"
        ) from error
    return number


def check_owner(store: ObjectStore, number: str) -> None:
    """Refuse an upload if another run has claimed the store since.

    Raises:
        CheckpointError: it has, the claim was deleted, or the store cannot be read.
    """
    found = store.read(OWNER)
    if found is None:
        raise CheckpointError(
            f"{store.url}/{OWNER}, which this run wrote at its start, was deleted: its claim to the "
            "store is lost; start the run again, which writes it anew and uploads what is missing",
            code="lost-claim",
        )
    if found != number.encode():
        raise CheckpointError(
            f"another run has started to upload to {store.url}; end one of the two, or give it another "
            "folder as checkpoint-store",
            code="other-claim",
        )


def warn_of_newer(save: Path, url: str, iteration: int) -> None:
    """Warn if `save` contains a newer checkpoint than the one of a store from which a run continues."""
    newer = [path for path in complete_checkpoints(save) if (iteration_of(path.name) or 0) > iteration]
    if newer:
        logger.warning(
            "%s contains %s, which is newer than the checkpoint of iteration %d that %s contains: this "
            "run continues from the older one and will replace it; to continue from the newer one, stop "
            "and set load: %s",
            save,
            newer[-1].name,
            iteration,
            url,
            save,
        )


def _refuse_checkpoints_of_others(store: ObjectStore, save: Path, load: str | None) -> None:
    latest = latest_in(store)
    if latest is None:
        return
    name, manifest = latest
    places = [save / name]
    if load is not None and is_url(load):
        if load.rstrip("/") == store.url:
            return
    elif load is not None:
        places += filter(None, [find_latest(Path(load))])
    paths = [place / MANIFEST for place in places]
    if not any(path.is_file() and path.read_bytes() == manifest for path in paths):
        raise CheckpointError(
            f"it contains {name} of another run, which is neither in {save} nor the checkpoint that "
            "this run continues from; set checkpoint-store to another folder, or, to continue that "
            f"training, set load: {store.url}"
        )
