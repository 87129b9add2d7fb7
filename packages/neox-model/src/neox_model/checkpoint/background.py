"""Save while training continues: copy to host memory, write in another process, make visible later.

Only the copy stops the run. All collectives are started by the training thread, in the same order on
all ranks. While a save is under way, every iteration sends whether this rank's part is done, and reads the
common answer to what the last iteration sent, so that no rank waits for it. All ranks therefore continue the
save at the same iteration: they collect the descriptions of the shards when all are written; then rank 0
writes the manifest and renames the folder, in a thread that does not communicate. An unfinished
checkpoint is deleted in a thread too, because a save often fails when its file system does not answer; the
next save waits for it.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.parts import RunParts
from neox_model.checkpoint.save import Saving, shard_size
from neox_model.checkpoint.shards import plan_shard
from neox_model.checkpoint.snapshot import Snapshot, in_thread
from neox_model.checkpoint.writer_process import WriterProcess
from neox_model.parallel.control import all_gather_object
from neox_model.parallel.delayed_exchange import DelayedExchange
from neox_model.parallel.groups import Groups

__all__ = ["BackgroundSaves"]

_DELETION_SECONDS = 10.0

logger = logging.getLogger(__name__)


class BackgroundSaves:
    """Saves checkpoints in the background, one at a time. All ranks must call the same methods.

    Args:
        groups: this rank's process groups.
        device: where the tensors are.
        patience: seconds without progress after which writing a shard has failed; None: no limit.
    """

    def __init__(self, groups: Groups, device: torch.device, *, patience: float | None) -> None:
        self._control = groups.control
        self._groups = groups
        self._patience = patience
        self._snapshot = Snapshot(device)
        self._all_done = DelayedExchange(groups.control, "min")
        self._saving: Saving | None = None
        # Writing the shard, or making the checkpoint visible.
        self._stage: WriterProcess | Future[None] | None = None
        self._publications: list[Callable[[], None]] = []
        self._deletion: Thread | None = None

    @property
    def iteration(self) -> int | None:
        """Return the iteration that is being saved; None if there is none."""
        return None if self._saving is None else self._saving.iteration

    def prepare(self, parts: RunParts, *, save_optimizer: bool = True) -> None:
        """Start to reserve the memory for a save of the state, so that the first one is as fast as others.

        Not collective. If the optimizer has no states yet (in float16 after an overflow), only the memory for
        the weights is reserved, and the first save reserves the rest.
        """
        self._snapshot.reserve(shard_size(parts, save_optimizer=save_optimizer))

    def start(
        self,
        directory: Path,
        parts: RunParts,
        *,
        iteration: int,
        config: Mapping[str, Any],
        save_optimizer: bool = True,
        save_rng: bool = True,
        keep_last: int | None = None,
    ) -> None:
        """Copy the state and start to write it. Collective; the arguments are those of `save_checkpoint`.

        Raises:
            CheckpointError: the state cannot be saved; the same message on all ranks.
        """
        assert self._saving is None, "finish() precedes the next save"
        self._saving = Saving(directory, parts, iteration=iteration, keep_last=keep_last)
        self.settle()
        with self._ended_on_failure() as saving:
            saving.create_folder()
            with saving.shared_outcome(), parts.engine.update.in_memory():
                values = saving.capture(
                    parts, config=config, save_optimizer=save_optimizer, save_rng=save_rng
                )
                plan = plan_shard(values)
                self._snapshot.take(plan)
                self._stage = WriterProcess(saving.shard, plan, self._snapshot, patience=self._patience)

    def proceed(self) -> None:
        """Continue with the save under way as far as possible without waiting. Collective; once an iteration.

        Raises:
            CheckpointError: the save has failed; the same message on all ranks.
        """
        if self._saving is not None and self._all_done.receive():
            self._continue()
        if self._stage is not None:
            self._all_done.send(int(self._stage.done()))

    def finish(self) -> None:
        """Wait until the save under way, if there is one, is complete. Collective over all ranks.

        Raises:
            CheckpointError: the save has failed; the same message on all ranks.
        """
        self._all_done.receive()
        while self._stage is not None:
            if isinstance(self._stage, WriterProcess):
                self._stage.wait()
            self._continue()

    def settle(self) -> None:
        """Wait until an unfinished checkpoint is deleted. Any save must follow this. Not collective."""
        if self._deletion is not None:
            self._deletion.join()

    def close(self) -> None:
        """Release the memory. Not collective.

        A shard that is being written is left unfinished, and its checkpoint does not become visible, which is
        logged; a checkpoint that is being made visible is completed.
        """
        if self._saving is not None:
            final = self._saving.final
            if isinstance(self._stage, WriterProcess):
                logger.warning("%s was not saved: the run ended while it was written", final)
            elif self._stage is not None and self._stage.exception() is not None:
                logger.error("%s was not saved: %s", final, self._stage.exception())
        self._leave()
        self._snapshot.close()
        if self._deletion is not None:
            # Later the folder may belong to another run, which deletes what is left.
            self._deletion.join(_DELETION_SECONDS)

    def _continue(self) -> None:
        """Begin the part of the save that follows the one that is done on all ranks. Collective."""
        stage = self._stage
        with self._ended_on_failure() as saving:
            assert stage is not None, "a part is under way"
            with saving.shared_outcome():
                written = stage.result()
            if written is not None:
                saving.collect(*written)
                self._leave_stage()
                self._publications = saving.publications()
            if self._publications:
                self._stage = in_thread(self._publications.pop(0))
            else:
                self._leave()

    def _leave(self) -> None:
        self._leave_stage()
        self._saving = None

    def _leave_stage(self) -> None:
        stage, self._stage = self._stage, None
        if isinstance(stage, WriterProcess):
            stage.stop()

    @contextmanager
    def _ended_on_failure(self) -> Iterator[Saving]:
        """Delete the unfinished checkpoint if the block fails, after all writers have ended. Collective."""
        assert self._saving is not None, "a save is under way"
        saving = self._saving
        try:
            yield saving
        except CheckpointError:
            self._leave()
            all_gather_object(self._control, None)
            self._deletion = Thread(target=saving.abandon, daemon=True)
            self._deletion.start()
            raise
