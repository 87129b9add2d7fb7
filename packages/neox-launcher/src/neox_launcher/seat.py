"""What a worker's process does before its program: `python -m neox_launcher.seat -m PROGRAM ARGUMENTS`.

It ties itself to its parent, listens to signals again, sends what it prints to its node, takes its share of
the host's cores, and then becomes the program, in the same process.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

from neox_launcher.stop_signals import STOP_SIGNALS, WARNING_SIGNAL
from neox_launcher.worker import (
    AGENT_FILE,
    RUN_DIR_VARIABLE,
    die_with_parent,
    register_worker,
    report_failure,
)

__all__ = ["CORES_FILE", "OUTPUT_STREAMS", "cores_of", "main", "output_pipe"]

CORES_FILE = "bind_cores"
OUTPUT_STREAMS = ("stdout", "stderr")


def main() -> None:
    """Become the program."""
    folder, rank = Path(os.environ[RUN_DIR_VARIABLE]), int(os.environ["RANK"])
    die_with_parent(int((folder / AGENT_FILE).read_text()))
    # The program unblocks the scheduler's warning once it handles it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS} - {WARNING_SIGNAL})
    _redirect_output(folder, rank)
    if (folder / CORES_FILE).exists():
        cores = cores_of(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        os.sched_setaffinity(0, cores)
    register_worker(rank)
    try:
        _become(sys.argv[1:])
    except Exception as error:
        sys.exit(report_failure(rank, error))


def output_pipe(folder: Path, rank: int, stream: str) -> Path:
    """Where a rank writes one of its streams; where it does not exist, the rank keeps its node's."""
    return folder / f"rank-{rank}.{stream}"


def cores_of(local_rank: int, workers: int) -> set[int]:
    """One worker's share of the cores that this process may use: neighbours, so that they share a socket.

    Args:
        local_rank: of the worker.
        workers: on this host; where there are more of them than cores, they take turns.
    """
    cores = sorted(os.sched_getaffinity(0))
    first, end = len(cores) * local_rank // workers, len(cores) * (local_rank + 1) // workers
    return set(cores[first:end]) or {cores[local_rank % len(cores)]}


def _redirect_output(folder: Path, rank: int) -> None:
    for number, stream in enumerate(OUTPUT_STREAMS, start=1):
        pipe = output_pipe(folder, rank, stream)
        if pipe.exists():
            descriptor = os.open(pipe, os.O_WRONLY)
            os.dup2(descriptor, number)
            os.close(descriptor)


def _become(arguments: list[str]) -> None:
    """As `python -m PROGRAM ARGUMENTS` does."""
    sys.argv = arguments[1:]
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
