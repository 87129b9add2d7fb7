"""Setup of a worker process: `python -m neox_launcher.worker.bootstrap -m PROGRAM ...`.

The process arranges to die with its parent, unblocks signals, redirects its output to its agent, binds to its
share of the host's cores if requested, and then runs the program in the same process.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

from neox_launcher.protocol.stop_signals import STOP_SIGNALS, WARNING_SIGNAL
from neox_launcher.worker.reporting import (
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
    """Set up this process and run the program in it."""
    folder, rank = Path(os.environ[RUN_DIR_VARIABLE]), int(os.environ["RANK"])
    die_with_parent(int((folder / AGENT_FILE).read_text()))
    # The tool that started the agent may have blocked them. The program unblocks the scheduler's warning when
    # it has installed a handler.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS} - {WARNING_SIGNAL})
    _redirect_output(folder, rank)
    if (folder / CORES_FILE).exists():
        cores = cores_of(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        os.sched_setaffinity(0, cores)
    try:
        register_worker(rank)
        # As the Python interpreter runs `-m PROGRAM ARGUMENTS`.
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except Exception as error:
        sys.exit(report_failure(rank, error))


def output_pipe(folder: Path, rank: int, stream: str) -> Path:
    """Return the pipe for one stream of a rank; if it does not exist, the rank uses the agent's stream."""
    return folder / f"rank-{rank}.{stream}"


def cores_of(local_rank: int, workers: int) -> set[int]:
    """Return one worker's share of the CPU cores of this process: consecutive cores, to share a socket.

    Args:
        local_rank: local rank of the worker.
        workers: number of workers on this host; with more workers than cores, cores are shared.
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


if __name__ == "__main__":
    main()
