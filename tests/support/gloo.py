"""The threads of this process's gloo groups, by the names that torch and gloo give them."""

import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

__all__ = ["threads_of_gloo_groups"]

# Every group has a device, and every device one thread that waits for messages.
_DEVICE_THREAD, _WORKER_THREAD = "gloo_tcp_loop", "pt_gloo_runloop"
_POLL_SECONDS, _NAMING_SECONDS, _END_SECONDS = 0.02, 0.3, 60


def threads_of_gloo_groups() -> tuple[int, int]:
    """Return the number of gloo groups of this process, and of their worker threads."""
    end = time.monotonic() + _END_SECONDS
    while not all(map(_has_waited, _threads())) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    # Some wait for memory before they have a name.
    time.sleep(_NAMING_SECONDS)
    names = Counter(_read(thread / "comm").strip() for thread in _threads())
    return names[_DEVICE_THREAD], names[_WORKER_THREAD]


def _threads() -> list[Path]:
    return list(Path("/proc/self/task").iterdir())


def _has_waited(thread: Path) -> bool:
    """Return whether a thread has begun to wait for work: until it runs, it has the name of the process."""
    return "\nvoluntary_ctxt_switches:\t0\n" not in _read(thread / "status")


def _read(path: Path) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return path.read_text()
    return ""
