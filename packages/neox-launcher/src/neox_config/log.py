"""Log format of all processes, including the rank."""

import logging
import sys

__all__ = ["configure_logging"]

_FORMAT = "%(asctime)s {who} %(name)s  %(mark)s%(message)s"


class _Formatter(logging.Formatter):
    """Marks warnings and errors, so that they are found among other lines."""

    def format(self, record: logging.LogRecord) -> str:
        record.mark = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return super().format(record)


def configure_logging(rank: int | None) -> None:
    """Log to stderr, one line per record, replacing the configuration of earlier calls.

    Rank 0 logs INFO and above, other ranks WARNING and above.

    Args:
        rank: rank of this worker; None if the process is not a worker.
    """
    who = "-----" if rank is None else f"r{rank:04d}"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(_FORMAT.format(who=who), datefmt="%Y-%m-%d %H:%M:%S"))
    root = logging.getLogger()
    root.handlers = [handler]
    # Other libraries log too much at INFO.
    root.setLevel(logging.WARNING)
    level = logging.WARNING if rank else logging.INFO
    for package in ("neox_launcher", "neox_data", "neox_kernels", "neox_model"):
        logging.getLogger(package).setLevel(level)
