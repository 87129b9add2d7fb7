"""React to Ctrl-C and SIGTERM while text is generated."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch import distributed

from neox_launcher.protocol.exit_codes import SIGNALLED
from neox_launcher.protocol.stop_signals import name_of
from neox_launcher.worker.reporting import requested_signal
from neox_model.errors import StopRequested
from neox_model.parallel.groups import Groups

__all__ = ["Interrupts", "agreed_in_copy", "ending_on_signals"]


class _Signalled(BaseException):
    """Raised where the signal arrived; `StopRequested` replaces it at the end of the block."""


# A scheduler that ends a job signals every process, and so does the launcher: the same request twice.
_SAME_REQUEST_SECONDS = 1.0


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Raise `StopRequested` in the block on the first SIGTERM or SIGINT; a second one ends the process.

    One within a second of the first is the same request. Code of others that passes over every `Exception`,
    as one that downloads and tries again, does not delay it; if it passes over this one too, or converts it,
    `StopRequested` is raised at the end of the block.
    """
    with _handling((signal.SIGTERM, signal.SIGINT)):
        yield


class Interrupts:
    """Ctrl-C in an interactive session: it ends the current reply, not the session. SIGTERM ends the session.

    Use it as a context manager; then the handlers are installed.

    Args:
        groups: this rank's process groups; the ranks of a copy of the model end a reply after the same token.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._is_interrupted = False
        self._waits_for_input = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals in the block."""
        before = signal.signal(signal.SIGINT, self._receive)
        try:
            with _handling((signal.SIGTERM,)):
                yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def waiting_for_input(self) -> Iterator[None]:
        """Raise KeyboardInterrupt on Ctrl-C in the block, and ignore one that came before it."""
        self._waits_for_input = True
        try:
            yield
        finally:
            self._waits_for_input = False

    def begin_reply(self) -> None:
        """Clear an earlier Ctrl-C."""
        self._is_interrupted = False

    def should_end_reply(self) -> bool:
        """Return True on all ranks of the copy if one was interrupted. Collective over these ranks."""
        return agreed_in_copy(self._groups, self._is_interrupted)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._waits_for_input:
            raise KeyboardInterrupt
        self._is_interrupted = True


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


@contextmanager
def _handling(numbers: tuple[signal.Signals, ...]) -> Iterator[None]:
    received: list[StopRequested] = []
    received_at = 0.0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal received_at
        now = time.monotonic()
        if received:
            if now - received_at > _SAME_REQUEST_SECONDS:
                restore()
                signal.raise_signal(number)
            return
        received_at = now
        asked = requested_signal(number)
        received.append(StopRequested(f"{name_of(asked)} received", exit_code=SIGNALLED + asked))
        raise _Signalled

    def restore() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)

    # Known before a signal can arrive.
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        restore()
        if received:
            raise received[0] from None
