"""Set how much of the processors another process or a thread may use."""

import logging
import os

__all__ = ["lower"]

_LOWEST_NICENESS = 19

logger = logging.getLogger(__name__)


def lower(process: int) -> None:
    """Leave processors to other processes; Linux derives the priority on disks from that on processors.

    A sandbox may forbid it; then only a warning is logged, because the work itself is possible.

    Args:
        process: a process or a thread; 0: this process.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, process, _LOWEST_NICENESS)
    except ProcessLookupError:
        return  # It has ended.
    except OSError as error:
        logger.warning("cannot lower the priority of writing checkpoints: %s", error)
