"""Watching over workers: plain Python children instead of torch's agent, real processes and signals."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from neox_launcher import supervision
from neox_launcher.supervision import supervise


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch):
    monkeypatch.setattr(supervision, "_GRACE_SECONDS", 0.3)


# An agent that starts two workers in sessions of their own, as torch's does, and ends when they have ended.
AGENT = """
import subprocess, sys
from neox_launcher.worker import AGENT_FILE, EXIT_CODES_FILE, RUN_DIR_VARIABLE, die_with_parent, write_aside
import json, os, pathlib
die_with_parent()
folder = pathlib.Path(os.environ[RUN_DIR_VARIABLE])
write_aside(folder / AGENT_FILE, str(os.getpid()))
workers = [subprocess.Popen([sys.executable, "-c", sys.argv[1], str(rank)], start_new_session=True)
           for rank in range(2)]
codes = {rank: worker.wait() for rank, worker in enumerate(workers)}
failed = {rank: code for rank, code in codes.items() if code}
if failed:
    write_aside(folder / EXIT_CODES_FILE, json.dumps(failed))
sys.exit(1 if failed else 0)
"""

WORKER = """
import os, pathlib, signal, sys, time
from neox_launcher.errors import ConfigError, NeoXError
from neox_launcher.worker import register_worker, report_failure
rank = int(sys.argv[1])
"""


def run(worker):
    """Supervise two workers that run the given lines."""
    code = WORKER + textwrap.dedent(worker)
    return supervise([sys.executable, "-c", AGENT, code], os.environ)


def test_workers_that_end_well_end_the_launch_well(capfd):
    outcome = run("register_worker(rank)\nprint('worker', rank, flush=True)")
    assert outcome.exit_code == 0
    assert outcome.first_failure is None
    assert sorted(capfd.readouterr().out.split()) == ["0", "1", "worker", "worker"]


def test_the_first_error_is_told_whole_and_the_others_are_ended():
    started = time.monotonic()
    outcome = run(
        """
        register_worker(rank)
        if rank == 1:
            try:
                raise NeoXError("the disk is full\\nmake room")
            except NeoXError as error:
                sys.exit(report_failure(rank, error))
        time.sleep(600)
        """
    )
    assert time.monotonic() - started < 60
    assert outcome.exit_code == 1
    assert outcome.first_failure.rank == 1
    assert outcome.num_failures == 1
    host = os.uname().nodename
    assert str(outcome.first_failure) == f"worker 1 on {host} failed:\nthe disk is full\nmake room"


def test_the_exit_code_is_that_of_the_first_of_several_failures(monkeypatch):
    monkeypatch.setattr(supervision, "_GRACE_SECONDS", 30)
    outcome = run(
        """
        register_worker(rank)
        folder = pathlib.Path(os.environ["NEOX_RUN_DIR"])
        while rank == 1 and not (folder / "rank-0.error.json").exists():
            time.sleep(0.01)
        error = ConfigError("no such thing") if rank == 0 else KeyError("x")
        try:
            raise error
        except Exception as error:
            sys.exit(report_failure(rank, error))
        """
    )
    assert outcome.exit_code == 2
    assert outcome.first_failure.message == "no such thing"
    assert outcome.num_failures == 2


def test_a_traceback_is_shown_for_what_nobody_foresaw():
    outcome = run(
        """
        register_worker(rank)
        try:
            {}["missing"]
        except KeyError as error:
            sys.exit(report_failure(rank, error))
        """
    )
    assert "KeyError: 'missing'" in str(outcome.first_failure)
    assert "Traceback" in str(outcome.first_failure)


@pytest.mark.parametrize(
    ("death", "code", "words"),
    [
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "killed by SIGKILL; the host may have run out of memory",
        ),
        ("os.abort()", 134, "ended by SIGABRT"),
        ("os._exit(7)", 7, "ended with exit code 7 without saying why"),
    ],
)
def test_a_worker_that_vanishes_is_the_first_failure_and_ends_the_others(death, code, words):
    outcome = run(
        f"""
        register_worker(rank)
        if rank == 0:
            {death}
        time.sleep(0.05)
        report_failure(rank, NeoXError("the other one does not answer"))
        time.sleep(600)
        """
    )
    assert outcome.exit_code == code
    assert outcome.first_failure.rank == 0
    assert words in outcome.first_failure.message


def test_a_worker_that_dies_before_it_can_register_is_told():
    outcome = run("sys.exit(3 if rank == 1 else 0)")
    assert outcome.exit_code == 3
    assert outcome.first_failure.rank == 1
    assert "what it printed is above" in outcome.first_failure.message


def test_a_worker_that_ends_early_and_well_does_not_end_the_others():
    outcome = run("register_worker(rank)\ntime.sleep(1.5 * rank)")
    assert outcome.exit_code == 0


def test_the_folder_of_a_launch_is_private_and_goes_with_it(tmp_path):
    seen = tmp_path / "seen"
    run(
        f"""
        register_worker(rank)
        folder = pathlib.Path(os.environ["NEOX_RUN_DIR"])
        if rank == 0:
            pathlib.Path({str(seen)!r}).write_text(f"{{folder}} {{folder.stat().st_mode & 0o777:o}}")
        """
    )
    folder, mode = seen.read_text().split()
    assert mode == "700"
    assert not Path(folder).exists()


LAUNCHER = """
import os, sys
from neox_launcher import supervision
from neox_launcher.supervision import supervise
outcome = supervise([sys.executable, "-c", sys.argv[1], sys.argv[2]], os.environ)
print("outcome", outcome.exit_code, outcome.first_failure, flush=True)
sys.exit(outcome.exit_code)
"""

# Saves when it is asked to stop.
SAVING = """
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(os.write(1, f"saved {rank}\\n".encode()) * 0))
register_worker(rank)
os.write(1, b"ready\\n")
time.sleep(600)
"""
STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
register_worker(rank)
os.write(1, f"ready {os.getpid()}\\n".encode())
time.sleep(600)
"""


def start(worker, folder):
    """A launcher in a process of its own, when both workers are ready; and what they printed."""
    code = WORKER + worker
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, AGENT, code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    return launcher, [launcher.stdout.readline() for _ in range(2)]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_one_signal_lets_the_workers_save(tmp_path, number, code):
    launcher, _ = start(SAVING, tmp_path)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == code
    assert sorted(out.splitlines()) == [f"outcome {code} None", "saved 0", "saved 1"]
    assert "once more to stop at once" in err


def test_a_second_signal_kills(tmp_path):
    launcher, _ = start(STUBBORN, tmp_path)
    launcher.send_signal(signal.SIGINT)
    assert "stopping" in launcher.stderr.readline() + launcher.stderr.readline()
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert out == "outcome 130 None\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_workers_die_with_a_launcher_that_is_killed(tmp_path):
    launcher, lines = start(STUBBORN, tmp_path)
    pids = [int(line.split()[1]) for line in lines]
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)
    launcher.stdout.close()
    launcher.stderr.close()


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_torch_runs_the_workers(tmp_path, monkeypatch):
    """The real agent around workers that need no torch."""
    pytest.importorskip("torch")
    script = tmp_path / "worker_program.py"
    script.write_text(
        "import os, sys\nfrom neox_launcher.ranks import read_rank\n"
        "from neox_launcher.worker import register_worker, report_failure\n"
        "me = read_rank()\nregister_worker(me.rank)\n"
        "if me.rank == 1: sys.exit(report_failure(1, ValueError(f'{me.local_rank} of {me.world_size}')))\n"
        "import time; time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    arguments = [
        "--nnodes=1",
        "--nproc-per-node=2",
        "--master-addr=127.0.0.1",
        f"--master-port={free_port()}",
    ]
    command = [sys.executable, "-m", "neox_launcher.node", *arguments, "-m", "worker_program"]
    outcome = supervise(command, os.environ)
    assert outcome.exit_code == 1
    assert outcome.first_failure.message == "ValueError: 1 of 2"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
