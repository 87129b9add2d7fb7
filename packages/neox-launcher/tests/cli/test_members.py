"""`neox-launch` started once per host by a scheduler, as real processes that join each other on loopback."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from support.refusals import shows

TOKEN = "fedcba9876543210" * 4
# The command, with a program of this test in place of the run.
COMMAND = """
import sys
from neox_launcher.backends.local import LocalBackend
from neox_launcher.cli import launch as cli
from neox_launcher.plan import plan
LocalBackend.missing = lambda backend: None
plan.PROGRAMS = {**plan.PROGRAMS, "train": "member_program"}
cli.refuse_what_cannot_run = lambda planned: None
cli.main(sys.argv[1:])
"""
PROGRAM = """
import os, pathlib, signal, sys, time
from neox_launcher.protocol.stop_signals import unblock_warning
assert "NEOX_TOKEN" not in os.environ
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
pathlib.Path("rank-" + os.environ["RANK"]).write_text(" ".join(os.environ[name] for name in names))
"""
PATIENCE_SECONDS = 120


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def start(minimal, tmp_path):
    """Return `start(program, *options, hosts=..., environment=...)`, which starts one process per host."""
    started = []

    def begin(program, *options, hosts=3, variables=None):
        (tmp_path / "member_program.py").write_text(PROGRAM + program)
        port = free_port()
        for rank in range(hosts):
            named = {"RANK": str(rank), "WORLD_SIZE": str(hosts), "MASTER_ADDR": "127.0.0.1"}
            named |= {"MASTER_PORT": str(port), "NEOX_TOKEN": TOKEN}
            if variables is not None:
                named = variables(rank)
            path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
            started.append(
                subprocess.Popen(
                    [sys.executable, "-c", COMMAND, "--config", minimal, *options],
                    cwd=tmp_path,
                    env=os.environ | named | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        return started

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def outcome(processes):
    outputs = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in processes]
    return [process.returncode for process in processes], outputs


def test_the_processes_train_one_job(start, tmp_path):
    codes, outputs = outcome(start("print('trained', flush=True)", "--set", "num-gpus=2"))
    assert codes == [0, 0, 0], outputs
    places = {path.name: path.read_text().split() for path in tmp_path.glob("rank-*")}
    assert {name: place[:4] for name, place in places.items()} == {
        f"rank-{rank}": [str(rank), str(rank % 2), "6", "2"] for rank in range(6)
    }
    assert len({place[4] for place in places.values()}) == 1
    assert outputs[0].count("trained") == 1
    assert shows(outputs[0], "process 0", "3")
    assert not any("trained" in output for output in outputs[1:])


def test_tasks_of_srun_train_one_job(start, tmp_path):
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[1-2]"}
    port = str(free_port())
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NEOX_TOKEN": TOKEN, "SLURM_LOCALID": "0"}
    processes = start("", hosts=2, variables=lambda rank: step | own | {"SLURM_PROCID": str(rank)})
    codes, outputs = outcome(processes)
    assert codes == [0, 0], outputs
    assert (tmp_path / "rank-1").read_text().startswith("1 0 2 1 ")


@pytest.mark.slow
def test_a_failure_on_one_host_ends_all_processes_with_its_code(start):
    codes, outputs = outcome(start("if os.environ['RANK'] == '2': os._exit(7)\ntime.sleep(600)"))
    assert codes == [7, 7, 7]
    assert "worker 2" in outputs[0]
    assert "with code 7" in outputs[0]


@pytest.mark.slow
def test_a_signal_to_any_process_stops_the_job(start, tmp_path):
    processes = start("time.sleep(600)")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(list(tmp_path.glob("rank-*"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    processes[2].send_signal(signal.SIGTERM)
    codes, outputs = outcome(processes)
    assert codes == [143, 143, 143], outputs
    assert "SIGTERM received" in outputs[0]


@pytest.mark.slow
def test_a_process_without_a_launcher_gives_up_with_the_reason(start):
    processes = start("", "--set", "start-timeout=2")
    processes[0].kill()
    codes, outputs = outcome(processes)
    assert codes[1:] == [2, 2]
    assert shows(outputs[1], "0 did", "2 s", "(start-timeout)")


@pytest.mark.slow
def test_another_token_is_refused(start):
    def variables(rank):
        named = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return named | {"NEOX_TOKEN": TOKEN if rank == 0 else TOKEN[::-1]}

    port = str(free_port())
    codes, outputs = outcome(start("", "--set", "start-timeout=4", hosts=2, variables=variables))
    assert codes[1] == 2
    assert "the same NEOX_TOKEN" in outputs[1]
    assert codes[0] != 0
    assert shows(outputs[0], "host-1", "4 s")


def test_without_a_secret_nothing_is_started(start, tmp_path):
    named = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "NEOX_TOKEN": ""}
    codes, outputs = outcome(start("", hosts=2, variables=lambda rank: named | {"RANK": str(rank)}))
    assert codes == [2, 2]
    assert all("NEOX_TOKEN is not" in output for output in outputs)
    assert not list(tmp_path.glob("rank-*"))


@pytest.mark.slow
@pytest.mark.parametrize("option", [["--max-restarts", "2"], ["--set", "autotuning.enabled=true"]])
def test_several_starts_are_refused(start, option):
    codes, outputs = outcome(start("", *option, hosts=2))
    assert codes == [2, 2]
    assert "workers several times" in outputs[0]


def test_a_dry_run_is_printed_once(start):
    codes, outputs = outcome(start("", "--dry-run", hosts=2))
    assert codes[1] == 0
    assert shows(outputs[0], "0 listens", "127.0.0.1")
    assert outputs[1] == ""
