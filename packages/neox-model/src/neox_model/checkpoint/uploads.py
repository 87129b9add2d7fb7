"""Upload saved checkpoints to an object store during training."""

import logging
import subprocess
import sys
import time
from pathlib import Path

from neox_launcher.protocol.stop_signals import stop_signals_blocked
from neox_model.checkpoint import directory as folders
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.object_store import PATIENCE_SECONDS

__all__ = ["Uploads"]

_POLL_SECONDS = 0.1
_REPORT_SECONDS = 60.0

logger = logging.getLogger(__name__)


class Uploads:
    """Uploads the checkpoints of one folder, one at a time, each in a separate process.

    If checkpoints are saved faster than they are uploaded, the newest one is uploaded next and those in
    between are skipped. While a checkpoint is uploaded, `keep_newest` does not delete it.

    Args:
        directory: folder of the checkpoints; this process holds its lock.
        url: URL of a folder in an object store.
        chunk_bytes: bytes of each part of an upload.
        owner: what `claim_store` returned for this folder and URL; None: other runs are not looked for.
        patience: seconds for which an operation that fails is repeated.
    """

    def __init__(
        self,
        directory: Path,
        url: str,
        *,
        chunk_bytes: int,
        owner: str | None = None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self._url = url
        self._options = [f"--chunk-bytes={chunk_bytes}", f"--patience={patience}"]
        if owner is not None:
            self._options.append(f"--owner={owner}")
        self._running: subprocess.Popen[str] | None = None
        self._folder, self._started = directory, 0.0
        self._next: Path | None = None
        self._failure: str | None = None
        for mark in folders.marks_of_uploads(directory):
            mark.unlink(missing_ok=True)

    def submit(self, folder: Path) -> None:
        """Upload a complete checkpoint as soon as the running upload has ended."""
        if self._next not in (None, folder):
            logger.warning("%s is not uploaded: %s is newer, and uploads are slower", self._next, folder.name)
        self._next = folder
        self.poll()

    def poll(self) -> None:
        """Report an upload that has ended, and start the next one."""
        if self._running is not None and self._running.poll() is not None:
            output, _ = self._running.communicate()
            code, self._running = self._running.returncode, None
            if code == 0:
                self._failure = None
                seconds = time.monotonic() - self._started
                logger.info("uploaded %s to %s in %.1f s", self._name, self._url, seconds)
            else:
                self._fail(output.strip() or f"its process ended with exit code {code}")
            self._unmark()
        if self._running is None and self._next is not None:
            self._start(self._next)
            self._next = None

    def finish(self) -> None:
        """Wait for all uploads.

        Raises:
            CheckpointError: the last one failed.
        """
        reported = time.monotonic()
        self.poll()
        while self._running is not None:
            time.sleep(_POLL_SECONDS)
            if time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                logger.info("waiting for the upload of %s to %s", self._name, self._url)
            self.poll()
        if self._failure is not None:
            raise CheckpointError(
                f"the last checkpoint, {self._folder}, is complete there, but was not uploaded to "
                f"{self._url}: {self._failure}; start the run again to upload it"
            )

    def close(self) -> None:
        """End the running upload, whose checkpoint stays incomplete in the store."""
        if self._running is not None:
            with self._running as process:  # Waits for its end.
                process.kill()
            self._running = None
            self._unmark()

    def _start(self, folder: Path) -> None:
        self._folder, self._started = folder, time.monotonic()
        command = [sys.executable, "-m", "neox_model.checkpoint.upload", *self._options, str(folder)]
        try:
            folders.upload_mark(folder).touch()
            # A signal to the job, or to all of its processes, must not end an upload.
            with stop_signals_blocked():
                self._running = subprocess.Popen(
                    [*command, self._url],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
        except OSError as error:  # A full disk or too many processes must not end the run.
            self._fail(f"its process cannot be started: {error}")
            self._unmark()

    def _fail(self, reason: str) -> None:
        self._failure = reason
        logger.error("%s was not uploaded to %s: %s", self._folder, self._url, reason)

    def _unmark(self) -> None:
        """Allow the deletion of the checkpoint; its mark, if it stays, is removed at the next start."""
        mark = folders.upload_mark(self._folder)
        try:
            mark.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("cannot delete %s: %s", mark, error)

    @property
    def _name(self) -> str:
        return folders.final_name(self._folder)
