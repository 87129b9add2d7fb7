"""The exit of a worker while a thread of gloo releases a tensor, and what is done before it."""

import os
import subprocess
import sys

import pytest

from neox_model import processes
from support.refusals import refused

# Rank 0 begins to exit with an operation under way, which rank 1 completes while rank 0 holds the lock of the
# interpreter: the thread of gloo waits for it when the finalization begins. Rank 0 reads shared memory until
# then, because reading a pipe would release the lock, and after all other functions, which release it, too.
# The finalization takes long enough for the thread.
WITH_AN_OPERATION_UNDER_WAY = """
import atexit, mmap, os, sys, time

reader, writer = os.pipe()
store_reader, store_writer = os.pipe()
completed = mmap.mmap(-1, 1)

def hold_the_lock():
    sys.setswitchinterval(1000.0)
    os.write(writer, b"x")
    while not completed[0]:
        pass
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        pass

atexit.register(hold_the_lock)

class Lingering:
    def __del__(self, sleep=time.sleep):
        sleep(1.0)

lingering = Lingering()

import torch
from torch import distributed
from neox_model.torch_compat import init_process_group
from neox_model.worker import exit_worker

rank = 0 if os.fork() else 1
if rank == 0:
    store = distributed.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    os.write(store_writer, b"%6d" % store.port)
else:
    store = distributed.TCPStore("127.0.0.1", int(os.read(store_reader, 6)), 2, False)
init_process_group("gloo", store=store, rank=rank, world_size=2)
group = distributed.new_group(backend="gloo")
distributed.barrier()
if rank == 1:
    os.read(reader, 1)
    distributed.all_reduce(torch.ones(4), group=group)
    completed[0] = 1
    os._exit(0)

distributed.all_reduce(torch.ones(4), group=group, async_op=True)
distributed.destroy_process_group()
EXIT(0)
"""
# Rank 1 has joined the group, and does not answer the operation of rank 0.
WITH_A_PEER_THAT_DOES_NOT_ANSWER = """
import os, signal, sys, tempfile, time
import torch
from torch import distributed
from neox_model import processes
from neox_model.torch_compat import init_process_group
from neox_model.worker import exit_worker

path = tempfile.mktemp()
child = os.fork()
rank = 0 if child else 1
init_process_group("gloo", store=distributed.FileStore(path, 2), rank=rank, world_size=2)
distributed.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
# Until it is stopped.
os.waitpid(child, os.WUNTRACED)
distributed.all_reduce(torch.ones(4), async_op=True)
processes.LEAVE_SECONDS = 1.0
began = time.monotonic()
processes.leave_processes()
print(time.monotonic() - began)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
EXIT(0)
"""
ENDING = """
import atexit, os, sys, threading, time
from neox_model.worker import exit_worker

def work():
    time.sleep(0.2)
    print("the thread has ended")

threading.Thread(target=work).start()
atexit.register(print, "the registered function was called")
exit_worker(0)
"""


def run(script: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], text=True, check=False, timeout=300, **options)


@pytest.mark.slow
def test_a_thread_of_gloo_does_not_abort_a_worker_that_exits():
    done = run(WITH_AN_OPERATION_UNDER_WAY.replace("EXIT", "exit_worker"), capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="later Pythons do not end such threads")
def test_the_finalization_of_the_interpreter_would_abort_it():
    done = run(WITH_AN_OPERATION_UNDER_WAY.replace("EXIT", "sys.exit"), capture_output=True)
    assert "terminate called" in done.stderr
    assert done.returncode < 0


@pytest.mark.slow
def test_a_peer_that_does_not_answer_delays_the_end_for_no_longer_than_the_limit():
    done = run(WITH_A_PEER_THAT_DOES_NOT_ANSWER.replace("EXIT", "exit_worker"), capture_output=True)
    assert done.returncode == 0
    assert 1 <= float(done.stdout) < 60
    assert "within 1 s" in done.stderr


def test_a_failure_to_leave_is_raised(monkeypatch):
    def fail() -> None:
        raise RuntimeError("the reason")

    monkeypatch.setattr(processes.distributed, "destroy_process_group", fail)
    with refused(RuntimeError, "the reason"):
        processes.leave_processes()


def test_threads_are_waited_for_and_registered_functions_are_called():
    done = run(ENDING, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["thread", "registered"]


def test_lost_output_is_no_success():
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = run(ENDING, stdout=full, stderr=subprocess.PIPE, env=buffered)
    assert done.returncode == 120


def test_a_closed_standard_output_is_no_error():
    command = ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, ENDING]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_profiler_that_runs_the_program_writes_its_results(tmp_path):
    program, results = tmp_path / "program.py", tmp_path / "results"
    program.write_text(ENDING)
    command = [sys.executable, "-m", "cProfile", "-o", str(results), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["thread", "registered"]
    assert results.exists()
