"""Signals that ask a launch to stop, and how a warning that arrives early is kept.

Schedulers send SIGUSR1 some time before they end a job (Slurm: `--signal=USR1@300`). By default it kills, so
every process of a launch blocks it until it handles it: the kernel keeps a blocked signal pending, and
processes inherit the mask. Nothing that a worker starts while it loads or compiles dies of it either.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["STOP_SIGNALS", "WARNING_SIGNAL", "block_warning", "name_of", "unblock_warning", "warning_blocked"]

WARNING_SIGNAL = signal.SIGUSR1
"""Asks for a checkpoint and a stop; schedulers repeat it, so it never ends a process at once."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, WARNING_SIGNAL)


def block_warning() -> set[signal.Signals | int]:
    """Keep `WARNING_SIGNAL` pending from now on, in this thread and in what it starts.

    Returns:
        The signal mask before, for `signal.pthread_sigmask(signal.SIG_SETMASK, ...)`.
    """
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, {WARNING_SIGNAL}))


def unblock_warning() -> set[signal.Signals | int]:
    """Deliver `WARNING_SIGNAL` from now on, a pending one at once.

    Returns:
        The signal mask before.
    """
    return set(signal.pthread_sigmask(signal.SIG_UNBLOCK, {WARNING_SIGNAL}))


@contextmanager
def warning_blocked() -> Iterator[None]:
    """Within, `WARNING_SIGNAL` stays pending."""
    before = block_warning()
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def name_of(number: int) -> str:
    """`Ctrl-C`, `SIGTERM`, ..."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
