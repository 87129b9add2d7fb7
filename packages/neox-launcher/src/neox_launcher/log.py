"""One line format for the log of every process, its rank included."""

import logging
import sys

__all__ = ["configure_logging"]

_FORMAT = "%(asctime)s {who} %(name)s  %(message)s"


def configure_logging(rank: int | None) -> None:
    """Log to stderr, one line per record; replaces what an earlier call set up.

    INFO comes from rank 0 alone, WARNING and above from every rank.

    Args:
        rank: this worker's rank; None in a command that is no worker.
    """
    who = "-----" if rank is None else f"r{rank:04d}"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT.format(who=who), datefmt="%Y-%m-%d %H:%M:%S"))
    root = logging.getLogger()
    root.handlers = [handler]
    # Other libraries talk too much at INFO.
    root.setLevel(logging.WARNING)
    level = logging.WARNING if rank else logging.INFO
    for package in ("neox_launcher", "neox_data", "neox_kernels", "neox_model"):
        logging.getLogger(package).setLevel(level)
