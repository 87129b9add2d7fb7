"""Set how much of the processors and disks another process or a thread may use. Linux."""

import ctypes
import logging
import os
import platform
from contextlib import suppress

__all__ = ["lower", "restore"]

_LOWEST_NICENESS = 19
# From linux/ioprio.h: who (one process), the idle class, and the middle of the usual class.
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_IDLE = 3 << 13
_IOPRIO_USUAL = (2 << 13) + 4
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}


logger = logging.getLogger(__name__)


def lower(process: int) -> None:
    """Leave processors and disks to other processes. Where the kernel has no such call, only processors.

    A sandbox may forbid it; then only a warning is logged, because the work itself is possible.

    Args:
        process: a process or a thread; 0: this process.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, process, _LOWEST_NICENESS)
        _set_disk_priority(process, _IOPRIO_IDLE)
    except ProcessLookupError:
        return  # It has ended.
    except OSError as error:
        logger.warning("cannot lower the priority of writing checkpoints: %s", error)


def restore(process: int) -> None:
    """Use disks as other processes do, and processors if the user may raise a priority."""
    # Raised for all users but root, for a process that has ended, and in sandboxes.
    with suppress(OSError):
        _set_disk_priority(process, _IOPRIO_USUAL)
        os.setpriority(os.PRIO_PROCESS, process, os.getpriority(os.PRIO_PROCESS, 0))


def _set_disk_priority(process: int, priority: int) -> None:
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, process, priority)
