"""Write snapshots of the GPU's memory: what is allocated, and which code allocated it.

A snapshot is a file for https://docs.pytorch.org/memory_viz, in PyTorch's format.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from neox_config.atomic import written_aside
from neox_model.torch_compat import (
    dump_memory_snapshot,
    on_out_of_memory,
    record_memory_history,
    stop_memory_history,
)
from neox_model.train.hooks.base import Hook
from neox_model.train.hooks.profile import name_of
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["MemoryHook"]

# As in GPT-NeoX: allocations and releases before the snapshot.
_EVENTS = 100_000

logger = logging.getLogger(__name__)


class MemoryHook(Hook):
    """Records allocations until an iteration, and writes a snapshot after it.

    Allocations are recorded from `start`, before the model is built, so that a snapshot after running out of
    memory shows them. After the last recorded iteration such a snapshot is still written, but shows only what
    is allocated. A training that resumes after that iteration stops recording when it has loaded.

    Args:
        last: the last recorded iteration.
        folder: receives the snapshots.
        rank: this process's rank.
        while_writing: function of the iteration that returns a context manager around the writing.
    """

    def __init__(
        self,
        last: int,
        folder: Path,
        *,
        rank: int,
        while_writing: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._last = last
        self._folder = folder
        self._rank = rank
        self._while_writing = while_writing
        self._is_recording = False
        self._ran_out = False
        self._first = 1

    def start(self) -> None:
        """Start recording."""
        on_out_of_memory(self._write_out_of_memory)
        record_memory_history(_EVENTS)
        self._is_recording = True

    def on_start(self, state: TrainState) -> None:
        """Stop recording if the last recorded iteration is past."""
        self._first = state.iteration + 1
        if state.iteration >= self._last:
            logger.info("no allocations are recorded: iteration %d, the last to record, is past", self._last)
            self.close()
        elif state.finished:
            self.close()

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Write the snapshot after the last recorded iteration, or the end of the training."""
        if not self._is_recording or (state.iteration < self._last and not state.finished):
            return
        with self._while_writing(state.iteration):
            self._write(name_of(self._rank, f"iterations-{self._first}-{state.iteration}", "memory.pickle"))
        self.close()

    def close(self) -> None:
        """Stop recording."""
        if self._is_recording:
            stop_memory_history()
            self._is_recording = False

    def _write_out_of_memory(self) -> None:
        """Write the first one only: a program may catch the error and run out of memory many times.

        The allocator calls this, and an exception would end the process instead of the training.
        """
        if self._ran_out:
            return
        self._ran_out = True
        try:
            self._write(name_of(self._rank, "out-of-memory", "pickle"))
        except (RuntimeError, MemoryError, TypeError, ValueError):  # Of torch, the host and pickle.
            logger.exception("the memory snapshot after running out of memory was not written")

    def _write(self, name: str) -> None:
        """Write a snapshot; a failure is logged, because a full disk must not end a long training."""
        path = self._folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_aside(path) as aside:
                dump_memory_snapshot(aside)
        except OSError as error:
            logger.error("the memory snapshot %s was not written: %s", path, error)
        else:
            logger.info("memory snapshot of rank %d: %s", self._rank, path)
