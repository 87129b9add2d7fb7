"""Run a test's function in N real processes that talk over gloo, or over NCCL with a GPU each.

    from support.distributed import run_ranks

    def check_sum(start: int) -> int:            # a module-level function of the test file
        ...                                      # torch.distributed is ready here
        return value                             # anything JSON can carry

    def test_sum():
        assert run_ranks(check_sum, size=2, start=3) == [4, 4]

The function is named by file and name, never pickled. Each process joins through a file store in a private
folder, so no port is needed and runs cannot meet. When one process fails or the time is up, the others are
killed at once and the first error, by time, is reported whole. The processes also die with this one.
"""

import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

__all__ = ["DistributedFailure", "run_ranks"]

_WORKER = Path(__file__).with_name("distributed_worker.py")
_POLL_SECONDS = 0.02
_OUTPUT_CHARACTERS = 4000
# DeepSpeed looks for a device itself, once for a process.
_DEVICES: dict[str, dict[str, str]] = {
    "gloo": {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"},
    "nccl": {"DS_ACCELERATOR": "cuda"},
}


class DistributedFailure(AssertionError):
    """A process failed or ran out of time; the message holds the first traceback and that rank's output."""


def run_ranks(
    function: Callable[..., Any],
    *,
    size: int,
    timeout_seconds: float = 300.0,
    backend: Literal["gloo", "nccl"] = "gloo",
    environment: dict[str, str] | None = None,
    **arguments: Any,
) -> list[Any]:
    """Call `function(**arguments)` in `size` processes and give what each returned, in rank order.

    Args:
        function: a module-level function of a test file; its module must be importable by path.
        size: number of processes, one per rank; world size.
        timeout_seconds: for the whole run.
        backend: gloo hides this machine's GPUs from the processes; with nccl rank i has the i-th.
        environment: variables to add for the processes.
        arguments: values JSON can carry.

    Returns:
        The functions' return values (through JSON), one per rank.

    Raises:
        DistributedFailure: with the first error in time.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        call = {
            "file": inspect.getfile(function),
            "name": function.__name__,
            "arguments": arguments,
            "folder": name,
            "backend": backend,
        }
        (folder / "call.json").write_text(json.dumps(call))
        processes = [
            _start(rank, size, folder, _DEVICES[backend] | (environment or {})) for rank in range(size)
        ]
        try:
            _wait(processes, folder, timeout_seconds)
        finally:
            _kill(processes)
        return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(size)]


def _start(rank: int, size: int, folder: Path, extra: dict[str, str]) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        **extra,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        # DeepSpeed reads these names; the store is a file, so nothing listens there.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    with (folder / f"output-{rank}.txt").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, str(_WORKER), str(folder), str(os.getpid())],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while True:
        codes = [process.poll() for process in processes]
        if any(code not in (None, 0) for code in codes):
            raise DistributedFailure(_first_error(codes, folder))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            waiting = [rank for rank, code in enumerate(codes) if code is None]
            tails = "\n".join(_output_tail(rank, folder) for rank in waiting)
            raise DistributedFailure(f"ranks {waiting} did not end within {timeout_seconds:g} s\n{tails}")
        time.sleep(_POLL_SECONDS)


def _first_error(codes: list[int | None], folder: Path) -> str:
    errors = [json.loads(path.read_text()) for path in folder.glob("error-*.json")]
    if errors:
        first = min(errors, key=lambda error: error["time"])
        return f"rank {first['rank']} failed:\n{first['traceback']}\n{_output_tail(first['rank'], folder)}"
    rank = next(rank for rank, code in enumerate(codes) if code not in (None, 0))
    return f"rank {rank} ended with code {codes[rank]}\n{_output_tail(rank, folder)}"


def _output_tail(rank: int, folder: Path) -> str:
    text = (folder / f"output-{rank}.txt").read_text(errors="replace")[-_OUTPUT_CHARACTERS:]
    return f"output of rank {rank}:\n{text}" if text else f"rank {rank} wrote nothing"


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
