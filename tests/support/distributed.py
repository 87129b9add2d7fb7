"""Run a test's function in N real processes that talk over gloo, or over NCCL with a GPU each, or on one GPU.

    from support.distributed import run_ranks

    def check_sum(start: int) -> int:            # a module-level function of the test file
        ...                                      # torch.distributed is ready here
        return value                             # anything JSON can carry

    def test_sum():
        assert run_ranks(check_sum, size=2, start=3) == [4, 4]

The function is named by file and name, never pickled. Each process joins through a file store in a private
folder, so no port is needed and runs cannot meet. When one process fails or the time is up, the others are
killed at once and the first error, by time, is reported whole; of a crash in native code, with the native
stacks of all threads. The processes also die with this one.

Importing torch and DeepSpeed takes longer than most tests. So ranks on gloo are forked from one of two
processes (`support.rank_server`) that have imported them in the environment of the test: two, so that strings
have other hashes on the other ranks of a group, and in the next launch, which finds orders of sets that ranks
do not share or that a resumed run does not have again. With NCCL, ranks start from nothing.
"""

import atexit
import inspect
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from support.crashes import native_stacks

__all__ = ["DistributedFailure", "run_ranks"]

_WORKER = Path(__file__).with_name("distributed_worker.py")
_SERVER = Path(__file__).with_name("rank_server.py")
_SERVERS = 2
_LAUNCHES = itertools.count()
# Of this many environments, the last ones, servers are kept.
_KEPT_ENVIRONMENTS = 2
_POLL_SECONDS = 0.02
_END_SECONDS = 120
_OUTPUT_CHARACTERS = 4000
# What differs between ranks, or is read only when it is used: PyTorch's compiler sets its folder itself.
_OWN_VARIABLES = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE PYTEST_CURRENT_TEST TORCHINDUCTOR_CACHE_DIR".split()
)
# DeepSpeed looks for a device itself, once for a process.
_DEVICES: dict[str, dict[str, str]] = {
    "gloo": {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"},
    "nccl": {"DS_ACCELERATOR": "cuda"},
}
# NCCL refuses two ranks on one GPU of one host: every rank names another host, and sends over the loopback.
_SHARED_GPU = {
    "DS_ACCELERATOR": "cuda",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
}


class DistributedFailure(AssertionError):
    """A process failed, crashed or ran out of time; the message holds the first traceback and its output."""


def run_ranks(
    function: Callable[..., Any],
    *,
    size: int,
    timeout_seconds: float = 300.0,
    backend: Literal["gloo", "nccl"] = "gloo",
    shares_gpu: bool = False,
    environment: dict[str, str] | None = None,
    **arguments: Any,
) -> list[Any]:
    """Call `function(**arguments)` in `size` processes and give what each returned, in rank order.

    Args:
        function: a module-level function of a test file; its module must be importable by path.
        size: number of processes, one per rank; world size.
        timeout_seconds: for the whole run.
        backend: gloo hides this machine's GPUs from the processes; with nccl rank i has the i-th.
        shares_gpu: all ranks compute on the first GPU, over either backend.
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
            "shares_gpu": shares_gpu,
        }
        (folder / "call.json").write_text(json.dumps(call))
        start: Callable[[Path, dict[str, str]], _Rank] = (
            _start_anew if shares_gpu or backend == "nccl" else partial(_fork, launch=next(_LAUNCHES))
        )
        processes: list[_Rank] = []
        variables = (_SHARED_GPU if shares_gpu else _DEVICES[backend]) | (environment or {})
        try:
            for rank in range(size):
                host = {"NCCL_HOSTID": f"rank-{rank}"} if shares_gpu else {}
                processes.append(start(folder, _environment(rank, size, variables | host)))
            _wait(processes, folder, timeout_seconds)
        finally:
            _kill(processes)
        return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(size)]


class _Rank(Protocol):
    """A process of a rank."""

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""

    def kill(self) -> None:
        """Kill it and the processes of its group, and wait until it has ended."""


class _Started:
    """A rank that this process has started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.poll = process.poll

    def kill(self) -> None:
        if self.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class _Server:
    """A process that forks ranks in one environment; it ends with this process, which closes its input."""

    _kept: ClassVar[dict[tuple[int, frozenset[tuple[str, str]]], "_Server"]] = {}
    # Threads may call `run_ranks`.
    _lock = threading.Lock()

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_SERVER)],
            stdin=subprocess.PIPE,
            # Libraries print while they are imported.
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )

    @classmethod
    def of(cls, number: int, environment: dict[str, str]) -> "_Server":
        """Return the server of this number in an environment, started now unless it is kept."""
        common = {name: value for name, value in environment.items() if name not in _OWN_VARIABLES}
        key = (number, frozenset(common.items()))
        with cls._lock:
            server = cls._kept.pop(key, None)
            if server is None or server.has_ended:
                server = cls(common)
            cls._kept[key] = server
            while len(cls._kept) > _SERVERS * _KEPT_ENVIRONMENTS:
                cls._kept.pop(next(iter(cls._kept))).close()
        return server

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def request(self, **values: Any) -> None:
        assert self._process.stdin is not None
        with self._lock, suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(values).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        try:
            self._process.communicate(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill a server that does not answer; its ranks end with it."""
        self._process.kill()
        self._process.wait()

    @classmethod
    def close_all(cls) -> None:
        """End all servers, so that none outlives this process."""
        while cls._kept:
            cls._kept.popitem()[1].close()


atexit.register(_Server.close_all)


class _Forked:
    """A rank that a server has forked, or is about to fork."""

    def __init__(self, server: _Server, folder: Path, environment: dict[str, str]) -> None:
        self._server, self._folder = server, folder
        self._code = folder / f"code-{environment['RANK']}"
        umask = os.umask(0)
        os.umask(umask)
        server.request(
            folder=str(folder),
            environment=environment,
            working_directory=os.getcwd(),
            umask=umask,
            blocked_signals=[int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        )

    def poll(self) -> int | None:
        if self._code.exists():
            return int(self._code.read_text())
        if self._server.has_ended:
            raise DistributedFailure("the process that forks the ranks has ended; its output says why")
        return None

    def kill(self) -> None:
        # A server that has ended has killed its ranks.
        with suppress(DistributedFailure):
            if self.poll() is None:
                self._server.request(kill=str(self._folder))
            deadline = time.monotonic() + _END_SECONDS
            while self.poll() is None:
                if time.monotonic() > deadline:
                    self._server.kill()
                time.sleep(_POLL_SECONDS)


def _environment(rank: int, size: int, more: dict[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        **more,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        # DeepSpeed reads these names; the store is a file, so nothing listens there.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }


def _start_anew(folder: Path, environment: dict[str, str]) -> _Rank:
    with (folder / f"output-{environment['RANK']}.txt").open("wb") as output:
        return _Started(
            subprocess.Popen(
                [sys.executable, str(_WORKER), str(folder), str(os.getpid())],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        )


def _fork(folder: Path, environment: dict[str, str], *, launch: int) -> _Rank:
    # Ranks whose numbers differ in one bit have different servers: in layouts of powers of two, these are the
    # neighbours in groups of every kind.
    number = (int(environment["RANK"]).bit_count() + launch) % _SERVERS
    return _Forked(_Server.of(number, environment), folder, environment)


def _wait(processes: list[_Rank], folder: Path, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while True:
        codes = [process.poll() for process in processes]
        # A rank that crashes waits for gdb.
        for report in folder.glob("crash-*.txt"):
            if report.stat().st_size:
                raise DistributedFailure(_crash(report))
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


def _crash(report: Path) -> str:
    rank = int(report.stem.removeprefix("crash-"))
    process = int((report.parent / f"process-{rank}").read_text())
    # Before the file is read: faulthandler may not have written all of it.
    stacks = native_stacks(process)
    return f"rank {rank} crashed:\n{report.read_text()}\n{stacks}\n{_output_tail(rank, report.parent)}"


def _output_tail(rank: int, folder: Path) -> str:
    output = folder / f"output-{rank}.txt"
    text = output.read_text(errors="replace")[-_OUTPUT_CHARACTERS:] if output.exists() else ""
    return f"output of rank {rank}:\n{text}" if text else f"rank {rank} wrote nothing"


def _kill(processes: list[_Rank]) -> None:
    for process in processes:
        process.kill()
