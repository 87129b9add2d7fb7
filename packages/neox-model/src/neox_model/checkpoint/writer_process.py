"""Start the shard writer, watch its progress and read its answer, in the worker."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from neox_launcher.protocol.stop_signals import stop_signals_blocked
from neox_model.checkpoint import priority, shard_writer
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.shards import ShardPlan, WrittenPiece
from neox_model.checkpoint.snapshot import Snapshot

__all__ = ["WriterProcess"]

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.02
_END_SECONDS = 10.0


class WriterProcess:
    """A process that writes one shard from a snapshot.

    Args:
        path: the new file.
        plan: its contents.
        snapshot: a copy of its bytes, unchanged until the process has ended.
        patience: seconds without progress after which it is ended; None: no limit.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, path: Path, plan: ShardPlan, snapshot: Snapshot, *, patience: float | None) -> None:
        self._path, self._plan, self._patience = path, plan, patience
        contents = {
            shard_writer.PARENT: os.getpid(),
            shard_writer.SIZE: plan.size,
            shard_writer.SPANS: plan.spans,
        }
        with ExitStack() as released, os.fdopen(os.memfd_create("neox-request"), "wb") as request:
            answer = released.enter_context(os.fdopen(os.memfd_create("neox-answer"), "rb"))
            self._answer = answer.fileno()
            os.pwrite(request.fileno(), json.dumps(contents, allow_nan=False).encode(), 0)
            self._process = _start(path, (snapshot.descriptor, request.fileno(), self._answer))
            self._files = released.pop_all()
        priority.lower(self._process.pid)
        self._progress, self._progressed = 0, time.monotonic()
        self._is_stuck = False

    def done(self) -> bool:
        """Return whether the process has ended, by itself or because it made no progress for too long."""
        if self._process.poll() is not None:
            return True
        progress = shard_writer.read_progress(self._answer)
        if progress != self._progress:
            self._progress, self._progressed = progress, time.monotonic()
        elif self._patience is not None and time.monotonic() - self._progressed > self._patience:
            self._kill()
            self._is_stuck = True
        return self._is_stuck

    def wait(self) -> None:
        """Wait until the process has ended."""
        while not self.done():
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_POLL_SECONDS)

    def result(self) -> tuple[list[WrittenPiece], int]:
        """Return what `write_shard` returns: the written pieces, and the file's size.

        Raises:
            CheckpointError: the shard was not written.
        """
        answer = os.pread(self._answer, os.fstat(self._answer).st_size, shard_writer.ANSWER_OFFSET)
        code = self._process.returncode
        found = json.loads(answer) if answer and not self._is_stuck and code in (0, 1) else {}
        if shard_writer.CHECKSUMS in found:
            return self._plan.written(self._path.name, found[shard_writer.CHECKSUMS]), self._plan.size
        end = f"ended with code {code}"
        if self._is_stuck:
            seconds = f"{self._patience:g} s"
            end = f"made no progress for {seconds} (hang-timeout); make sure that the file system answers"
        elif code is not None and code < 0:
            end = f"was ended by {signal.Signals(-code).name}"
        raise CheckpointError(found.get(shard_writer.ERROR) or f"the writer of {self._path} {end}")

    def stop(self) -> None:
        """End the process, if it has not ended, and release its files."""
        self._kill()
        self._files.close()

    def _kill(self) -> None:
        if self._is_stuck or self._process.poll() is not None:
            return
        self._process.kill()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            # It waits for a disk or a file server, which no signal interrupts.
            logger.warning("the writer of %s does not end: its file system does not answer", self._path)


def _start(path: Path, files: tuple[int, ...]) -> "subprocess.Popen[bytes]":
    module = shard_writer.__name__
    command = [sys.executable, "-P", "-m", module, str(path), *map(str, files)]
    # All processes of a job receive them, to save and end. The writer ends with its worker instead.
    with stop_signals_blocked():
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=files)
