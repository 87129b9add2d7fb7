"""Decide by time, on all ranks at the same iteration, that a checkpoint is due."""

import time
from collections.abc import Callable

import torch
from torch import distributed

from neox_model.parallel.groups import Group

__all__ = ["SaveClock"]

_SECONDS_PER_MINUTE = 60.0


class SaveClock:
    """Requests a save when enough time has passed since the last one, by the clock of rank 0.

    Rank 0 sends its decision to all ranks while the next iteration runs, so that no rank waits for it.

    Args:
        control: CPU group of all ranks.
        minutes: time between two saves.
        now: clock in seconds; only that of rank 0 counts.
    """

    def __init__(self, control: Group, *, minutes: float, now: Callable[[], float] = time.monotonic) -> None:
        self._control = control
        self._seconds = minutes * _SECONDS_PER_MINUTE
        self._now = now
        self._since = now()
        self._sent: tuple[torch.Tensor, distributed.Work | None] | None = None

    def restart(self) -> None:
        """Count the time from now on, after a save."""
        self._since = self._now()

    def send(self) -> None:
        """Start sending rank 0's decision. Collective over the control group."""
        decision = torch.tensor([int(self._now() - self._since >= self._seconds)])
        work = None
        if self._control.size > 1:
            work = distributed.broadcast(
                decision, group=self._control.process_group, group_src=0, async_op=True
            )
        self._sent = decision, work

    def receive(self) -> bool:
        """Return the decision that was sent last, once; False if none was."""
        if self._sent is None:
            return False
        (decision, work), self._sent = self._sent, None
        if work is not None:
            work.wait()
        return bool(decision)
