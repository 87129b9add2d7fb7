"""The threads of this process's gloo groups, by the names that torch and gloo give them."""

import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

__all__ = ["threads_of_gloo_groups"]

# Every group has a device, and every device one thread that waits for messages.
_DEVICE_THREAD, _WORKER_THREAD = "gloo_tcp_loop", "pt_gloo_runloop"
_NAMING_SECONDS = 0.2


def threads_of_gloo_groups() -> tuple[int, int]:
    """Return the number of gloo groups of this process, and of their worker threads."""
    # A new thread has the name of the process until it runs.
    time.sleep(_NAMING_SECONDS)
    names: Counter[str] = Counter()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            names[(thread / "comm").read_text().strip()] += 1
    return names[_DEVICE_THREAD], names[_WORKER_THREAD]
