"""Upload saved checkpoints to an object store; see `checkpoint/uploads.py`."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from neox_config.errors import NeoXError
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.uploads import Uploads
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["UploadHook"]


class UploadHook(Hook):
    """Reports uploads that have ended, starts those that wait, and waits for the last one at the end.

    A failed upload is logged as an error and training continues; the next checkpoint is uploaded as usual.
    A failed upload of the last checkpoint ends the training with an error. It runs on rank 0 alone, after all
    hooks that communicate.

    Args:
        uploads: uploads the checkpoints.
        resumed: the checkpoint that this training resumed from, if it is in `save`: its upload may have
            failed, or been ended with the last attempt.
        while_waiting: function of the iteration that returns a context manager around the wait.
    """

    def __init__(
        self,
        uploads: Uploads,
        *,
        resumed: Path | None,
        while_waiting: Callable[[int], AbstractContextManager[object]],
    ) -> None:
        self._uploads = uploads
        self._resumed = resumed
        self._while_waiting = while_waiting

    def on_start(self, state: TrainState) -> None:
        """Upload the checkpoint that this training resumed from, unless the store has it."""
        if self._resumed is not None:
            self._uploads.submit(self._resumed)

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Report and start uploads."""
        self._uploads.poll()

    def on_end(self, state: TrainState) -> None:
        """Wait for the last upload.

        Raises:
            NeoXError: it failed.
        """
        with self._while_waiting(state.iteration):
            try:
                self._uploads.finish()
            except CheckpointError as error:
                raise NeoXError(str(error)) from error
