import ctypes
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from support.distributed import DistributedFailure, run_ranks
from support.refusals import refused


def sum_of_ranks(start: int) -> list[int]:
    value = torch.tensor(start + dist.get_rank())
    dist.all_reduce(value)
    return [dist.get_rank(), int(value)]


def rank_one_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the reason")
    dist.barrier()


def sleep_for_ever() -> None:
    time.sleep(3600)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def read_nothing() -> None:
    ctypes.string_at(0)


def free_twice_in_a_thread(is_waited_for: bool) -> None:
    """Corrupt the memory as two threads of a group can."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    memory = ctypes.c_void_p(libc.malloc(64))

    def free() -> None:
        libc.free(memory)
        libc.free(memory)

    thread = threading.Thread(target=free, daemon=True)
    thread.start()
    thread.join(None if is_waited_for else 0.5)


def describe(folder: str) -> list[object]:
    """What must differ between ranks, and what must be that of the test."""
    with open(os.path.join(folder, f"of-{dist.get_rank()}"), "x") as own:
        return [os.getppid(), hash("a string"), os.getcwd(), os.environ.get("OWN"), os.getpgid(0), own.name]


def permissions(folder: str) -> list[object]:
    """Mode of a new file, and whether SIGUSR1 is blocked."""
    path = Path(folder, f"mode-{dist.get_rank()}")
    path.touch()
    return [path.stat().st_mode & 0o777, signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ())]


def draw() -> list[float]:
    return [random.random(), np.random.random()]


def is_ended(pid: int) -> bool:
    """Return True if there is no such process, or it is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_each_rank_returns_its_value():
    assert run_ranks(sum_of_ranks, size=2, start=10) == [[0, 21], [1, 21]]


def test_a_rank_has_the_permissions_and_blocked_signals_of_the_test(tmp_path):
    """The server of ranks may have been started by another test."""
    for umask, is_blocked in ((0o022, False), (0o077, True)):
        folder = tmp_path / str(umask)
        folder.mkdir()
        before = os.umask(umask)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1] if is_blocked else [])
        try:
            found = run_ranks(permissions, size=2, folder=str(folder))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.umask(before)
        assert found == [[0o666 & ~umask, is_blocked]] * 2


def test_the_first_error_is_reported_and_the_other_rank_ends():
    with refused(DistributedFailure, "1 failed", "ValueError"):
        run_ranks(rank_one_fails, size=2)


@pytest.mark.slow
def test_the_time_limit_ends_the_run():
    with refused(DistributedFailure, "within 3 s"):
        run_ranks(sleep_for_ever, size=1, timeout_seconds=3)


def test_a_rank_that_is_killed_is_reported():
    with refused(DistributedFailure, "0 ended", "code -9"):
        run_ranks(killed, size=1)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gdb") is None, reason="requires gdb")
@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_crash_is_reported_with_the_stacks_of_python_and_of_native_code(is_waited_for):
    """Also if only a thread crashes, and the others end."""
    with pytest.raises(DistributedFailure) as raised:
        run_ranks(free_twice_in_a_thread, size=1, is_waited_for=is_waited_for)
    text = str(raised.value)
    assert text.startswith("rank 0 crashed:\nFatal Python error: Aborted")
    assert 'test_distributed.py", line' in text
    # Of all threads, the one that crashed and another.
    assert re.search(r"#\d+ .*abort", text)
    assert re.search(r"#\d+ .*free", text)
    assert len(re.findall(r"^Thread \d+ ", text, re.MULTILINE)) > 2
    assert "double free" in text.rpartition("output of rank 0")[2]


@pytest.mark.slow
def test_the_signal_of_a_crash_is_reported_and_the_other_rank_ends():
    with refused(DistributedFailure, "Fatal Python error"):
        run_ranks(read_nothing, size=2)


def test_ranks_that_are_neighbours_in_a_group_and_launches_hash_strings_differently(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    launches = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        found = run_ranks(describe, size=4, folder=str(tmp_path / name))
        parents, hashes, folders, variables, process_groups, _ = zip(*found, strict=True)
        for values in (parents, hashes):
            assert values[0] == values[3] != values[1] == values[2]
        assert os.getpid() not in parents
        assert set(folders) == {str(tmp_path)}
        assert variables == (None,) * 4
        assert len(set(process_groups)) == 4
        launches.append((parents, hashes))
    for values, later in zip(*launches, strict=True):
        assert all(one != other for one, other in zip(values, later, strict=True))


def test_neither_ranks_nor_launches_share_a_random_state():
    drawn = [*run_ranks(draw, size=4), *run_ranks(draw, size=4)]
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 8


@pytest.mark.slow
def test_ranks_are_forked_from_processes_with_the_variables_of_the_test(tmp_path, monkeypatch):
    launches = itertools.count()

    def found() -> tuple[set[object], set[object]]:
        """Return the processes and the variable."""
        folder = tmp_path / str(next(launches))
        folder.mkdir()
        parents, _, _, variables, *_ = zip(*run_ranks(describe, size=2, folder=str(folder)), strict=True)
        return set(parents), set(variables)

    usual, without = found()
    monkeypatch.setenv("OWN", "1")
    changed, given = found()
    assert (without, given) == ({None}, {"1"})
    assert usual.isdisjoint(changed)
    assert found()[0] == changed
    monkeypatch.delenv("OWN")
    assert found()[0] == usual


@pytest.mark.slow
def test_a_server_ends_with_the_process_that_uses_it():
    program = (
        "import os; from support.distributed import _Server;"
        "print(_Server(dict(os.environ))._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        check=False,
    )
    assert found.returncode == -signal.SIGKILL
    for _ in range(1200):
        if is_ended(int(found.stdout)):
            return
        time.sleep(0.1)
    raise AssertionError("the server runs on")
