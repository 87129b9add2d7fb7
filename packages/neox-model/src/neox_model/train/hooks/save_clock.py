"""Decide by time, on all ranks at the same iteration, that a checkpoint is due."""

import time
from collections.abc import Callable

from neox_model.parallel.delayed_exchange import DelayedExchange
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
        self._is_first = control.rank == 0
        self._decision = DelayedExchange(control, "max")
        self._seconds = minutes * _SECONDS_PER_MINUTE
        self._now = now
        self._since = now()

    def restart(self) -> None:
        """Count the time from now on, after a save."""
        self._since = self._now()

    def send(self) -> None:
        """Start sending rank 0's decision. Collective over the control group."""
        is_due = self._is_first and self._now() - self._since >= self._seconds
        self._decision.send(int(is_due))

    def receive(self) -> bool:
        """Return the decision that was sent last, once; False if none was."""
        return bool(self._decision.receive())
