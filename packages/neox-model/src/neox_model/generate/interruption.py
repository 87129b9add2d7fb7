"""React to Ctrl-C and SIGTERM while text is generated."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch import distributed

from neox_launcher.protocol.exit_codes import SIGNALLED
from neox_launcher.protocol.stop_signals import handling, name_of
from neox_launcher.worker.reporting import requested_signal
from neox_model.errors import StopRequested
from neox_model.parallel.groups import Groups

__all__ = ["Interrupts", "agreed_in_copy", "ending_on_signals", "stop_for"]


class _Signalled(BaseException):
    """Raised where the signal arrived; `StopRequested` replaces it at the end of the block."""


# A scheduler that ends a job signals every process, and so does the launcher: the same request twice.
_SAME_REQUEST_SECONDS = 1.0


@contextmanager
def ending_on_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Raise `StopRequested` in the block on the first of these signals; a second one ends the process.

    One within a second of the first is the same request. Code of others that passes over every `Exception`,
    as one that downloads and tries again, does not delay it; if it passes over this one too, or converts it,
    `StopRequested` is raised at the end of the block.

    Args:
        numbers: the signals; none: SIGTERM and SIGINT.
    """
    received: list[StopRequested] = []
    received_at = 0.0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal received_at
        now = time.monotonic()
        if not received:
            received_at = now
            received.append(stop_for(number))
            raise _Signalled
        if now - received_at > _SAME_REQUEST_SECONDS:
            restore()
            signal.raise_signal(number)

    try:
        with handling(stop, *(numbers or (signal.SIGTERM, signal.SIGINT))) as restore:
            yield
    finally:
        if received:
            raise received[0] from None


class Interrupts:
    """Ctrl-C in an interactive session: it ends the current reply, not the session. SIGTERM ends the session.

    Attributes:
        is_interrupted: Ctrl-C was pressed since this was last set to False.
        waits_for_input: Ctrl-C raises KeyboardInterrupt instead.
    """

    def __init__(self) -> None:
        self.is_interrupted = self.waits_for_input = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals in the block."""
        with handling(self._receive, signal.SIGINT), ending_on_signals(signal.SIGTERM):
            yield

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.waits_for_input:
            raise KeyboardInterrupt
        self.is_interrupted = True


def agreed_in_copy(groups: Groups, is_true: bool) -> bool:
    """Return True on all ranks of a copy of the model if it is true on one. Collective over these ranks."""
    shared = [group for group in (groups.model, groups.pipe) if group.size > 1]
    if not shared:
        return is_true
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    flag = torch.tensor(int(is_true), device=device)
    for group in shared:
        distributed.all_reduce(flag, op=distributed.ReduceOp.MAX, group=group.process_group)
    return bool(flag)


def stop_for(received: int) -> StopRequested:
    """Return the error that ends the process after a signal."""
    asked = requested_signal(received)
    return StopRequested(f"{name_of(asked)} received", exit_code=SIGNALLED + asked)
