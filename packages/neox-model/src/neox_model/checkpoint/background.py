"""Save while the training continues: copy to host memory, write in another process, make visible later.

Only the copy stops the training. All collectives run in the training's own thread, between iterations. While
a save is under way, every iteration sends whether this rank's part is done, and reads the common answer to
what the last iteration sent, so that no rank waits for it. All ranks therefore continue the save at the
same iteration: they collect the descriptions of the shards when all are written; then rank 0 writes the
manifest and renames the folder, in a thread that does not communicate.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed

from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.outcome import gather
from neox_model.checkpoint.parts import RunParts
from neox_model.checkpoint.save import Saving, shard_size
from neox_model.checkpoint.shards import plan_shard
from neox_model.checkpoint.snapshot import Snapshot
from neox_model.checkpoint.writer_process import WriterProcess
from neox_model.parallel.groups import Group, Groups

__all__ = ["BackgroundSaves"]


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
        self._vote = _Vote(groups.control)
        self._saving: Saving | None = None
        self._part: _Part | None = None

    @property
    def iteration(self) -> int | None:
        """Return the iteration that is being saved; None if there is none."""
        return None if self._saving is None else self._saving.iteration

    def prepare(self, parts: RunParts, *, save_optimizer: bool = True) -> None:
        """Start to reserve the memory for a save of the state, so that the first one is as fast as others."""
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
        self._saving = Saving(directory, self._groups, iteration=iteration, keep_last=keep_last)
        with self._ended_on_failure() as saving:
            saving.create_folder()
            with saving.shared_outcome():
                values = saving.capture(
                    parts, config=config, save_optimizer=save_optimizer, save_rng=save_rng
                )
                plan = plan_shard(values)
                self._snapshot.take(plan)
                self._part = WriterProcess(saving.shard, plan, self._snapshot, patience=self._patience)

    def proceed(self) -> None:
        """Continue with the save under way as far as possible without waiting. Collective; once an iteration.

        Raises:
            CheckpointError: the save has failed; the same message on all ranks.
        """
        if self._saving is not None and self._vote.receive():
            self._continue()
        if self._part is not None:
            self._vote.send(self._part.has_ended())

    def finish(self) -> None:
        """Wait until the save under way, if there is one, is complete. Collective over all ranks.

        Raises:
            CheckpointError: the save has failed; the same message on all ranks.
        """
        self._vote.receive()
        while self._part is not None:
            self._part.wait()
            self._continue()

    def close(self) -> None:
        """End the save under way, which does not become visible, and release the memory."""
        self._leave()
        self._snapshot.close()

    def _continue(self) -> None:
        """Begin the part of the save that follows the one that is done on all ranks. Collective."""
        part = self._part
        with self._ended_on_failure() as saving:
            if isinstance(part, WriterProcess):
                with saving.shared_outcome():
                    pieces, size = part.result()
                saving.collect(pieces, size)
                part.stop()
                self._part = _Publication(saving)
                return
            assert isinstance(part, _Publication), "one of two parts is under way"
            with saving.shared_outcome():
                part.result()
            self._leave()

    def _leave(self) -> None:
        if isinstance(self._part, WriterProcess):
            self._part.stop()
        self._part = self._saving = None

    @contextmanager
    def _ended_on_failure(self) -> Iterator[Saving]:
        """Delete the unfinished checkpoint if the block fails, after all writers have ended. Collective."""
        assert self._saving is not None, "a save is under way"
        with self._saving.abandoned_on_failure():
            try:
                yield self._saving
            except CheckpointError:
                self._leave()
                gather(self._control, None)
                raise


class _Part(Protocol):
    """A part of a save that this rank does while the training continues."""

    def has_ended(self) -> bool:
        """Return whether it is done or has failed."""

    def wait(self) -> None:
        """Wait until it is done or has failed."""


class _Publication:
    """The last part: rank 0 makes the checkpoint visible, in a thread that does not communicate."""

    def __init__(self, saving: Saving) -> None:
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-publication")
        self._outcome = thread.submit(saving.publish)
        thread.shutdown(wait=False)

    def has_ended(self) -> bool:
        return self._outcome.done()

    def wait(self) -> None:
        self._outcome.exception()

    def result(self) -> None:
        """Raise the error if it failed."""
        self._outcome.result()


class _Vote:
    """Asks all ranks whether they are done, and reads the answer an iteration later.

    Args:
        control: CPU group of all ranks.
    """

    def __init__(self, control: Group) -> None:
        self._control = control
        self._sent: tuple[torch.Tensor, distributed.Work | None] | None = None

    def send(self, is_done: bool) -> None:
        """Start to exchange the answers. Collective over the control group."""
        answer, work = torch.tensor([int(is_done)]), None
        if self._control.size > 1:
            work = distributed.all_reduce(
                answer,
                op=distributed.ReduceOp.MIN,
                group=self._control.process_group,
                async_op=True,
            )
        self._sent = answer, work

    def receive(self) -> bool:
        """Return whether all ranks were done when the last answers were sent; False if none were."""
        if self._sent is None:
            return False
        (answer, work), self._sent = self._sent, None
        if work is not None:
            work.wait()
        return bool(answer)
