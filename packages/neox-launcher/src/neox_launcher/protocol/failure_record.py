"""The failures of a run, kept in its log folder for `neox-report`.

`LOG_DIR/failures.jsonl` has one JSON object per failure, with the fields of `Failure`, the name of the launch
and the number of the restart. Agents of several hosts append the failures of their workers, and the launcher
those that only it knows, such as lost hosts and hangs; each line is written by one system call.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from neox_config.facts.records import FAILURES
from neox_launcher.protocol.outcome import Failure

__all__ = ["record_failures"]

# Errors that repeat in every worker of a large host must not fill the disk.
_LONGEST = 4000


def record_failures(
    folder: Path, failures: Iterable[Failure], *, launch: str | None = None, restart: int | None = None
) -> None:
    """Append failures to the file in a log folder, which is created if it is missing.

    Args:
        folder: the run's `log_dir`.
        failures: failures of workers, or of what the launcher itself found.
        launch: name of the launch.
        restart: number of the restart in which they failed; 0: the first start of the launch.

    Raises:
        OSError: the file cannot be written.
    """
    records = [
        {
            "time": failure.time,
            "launch": launch,
            "restart": restart,
            "host": failure.host,
            "rank": failure.rank,
            "message": failure.message[:_LONGEST],
            "traceback": failure.traceback and failure.traceback[-_LONGEST:],
            "output": failure.output[-_LONGEST:],
            "exit_code": failure.exit_code,
            "unreported": failure.unreported,
        }
        for failure in failures
    ]
    if not records:
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / FAILURES, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        for record in records:
            os.write(descriptor, f"{json.dumps(record, allow_nan=False)}\n".encode())
    finally:
        os.close(descriptor)
