"""Signals that request a stop, and the blocking of an early warning.

Schedulers send SIGUSR1 some time before they end a job (Slurm: `--signal=USR1@300`). Its default action ends
the process, so every process of a launch blocks it until it has installed a handler: the kernel keeps a
blocked signal pending, and child processes inherit the mask. Processes that a worker starts while it loads or
compiles are therefore not ended by it either.
"""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

__all__ = [
    "STOP_SIGNALS",
    "WARNING_SIGNAL",
    "block_warning",
    "handling",
    "ignore_warning",
    "name_of",
    "signals_blocked",
    "stop_signals_blocked",
    "unblock_warning",
    "warning_blocked",
]

WARNING_SIGNAL = signal.SIGUSR1
"""Requests a checkpoint and a stop; schedulers repeat it, so repetitions do not kill a process."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, WARNING_SIGNAL)


def block_warning() -> set[signal.Signals | int]:
    """Block `WARNING_SIGNAL` in this thread and in the threads and processes that it starts.

    Returns:
        The previous signal mask, for `signal.pthread_sigmask(signal.SIG_SETMASK, ...)`.
    """
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, {WARNING_SIGNAL}))


def unblock_warning() -> set[signal.Signals | int]:
    """Unblock `WARNING_SIGNAL`, which delivers a pending one immediately.

    Returns:
        The previous signal mask.
    """
    return set(signal.pthread_sigmask(signal.SIG_UNBLOCK, {WARNING_SIGNAL}))


def ignore_warning() -> None:
    """Ignore `WARNING_SIGNAL`, including a pending one, in a process whose exit code is already decided."""
    signal.signal(WARNING_SIGNAL, signal.SIG_IGN)


@contextmanager
def handling(receive: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[Callable[[], None]]:
    """Handle signals in the block; provide a function that restores their handlers before its end.

    SIGHUP stays ignored where nohup ignores it.
    """

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    # Known before a signal can arrive.
    before = {number: signal.getsignal(number) for number in numbers}
    if before.get(signal.SIGHUP) is signal.SIG_IGN:
        del before[signal.SIGHUP]
    try:
        for number in before:
            signal.signal(number, receive)
        yield restore
    finally:
        restore()


@contextmanager
def signals_blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Block signals in this thread within the context, and restore its signal mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def warning_blocked() -> AbstractContextManager[None]:
    """Block `WARNING_SIGNAL` within the context."""
    return signals_blocked({WARNING_SIGNAL})


def stop_signals_blocked() -> AbstractContextManager[None]:
    """Block all signals that request a stop: a process started in this context never receives them."""
    return signals_blocked(STOP_SIGNALS)


def name_of(number: int) -> str:
    """Return the name of a signal for messages: `Ctrl-C`, `SIGTERM`, ..."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
