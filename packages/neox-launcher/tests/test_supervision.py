"""Watching over workers: real nodes, processes and signals. Nodes are those of MPI: they need no torch."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from neox_launcher import supervision
from neox_launcher.backends.base import Command
from neox_launcher.orders import Orders
from neox_launcher.resources.host import Host
from neox_launcher.supervision import supervise

HOST = os.uname().nodename
NODE = (sys.executable, "-m", "neox_launcher.node", "--launcher")

WORKER = """
import os, pathlib, signal, sys, time
from neox_launcher.errors import ConfigError, NeoXError
from neox_launcher.ranks import read_rank
from neox_launcher.stop_signals import unblock_warning
from neox_launcher.worker import Progress, report_failure
rank = read_rank().rank
folder = pathlib.Path(os.environ["NEOX_RUN_DIR"])

def fail(error):
    try:
        raise error
    except Exception as error:
        sys.exit(report_failure(rank, error))
"""


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch):
    monkeypatch.setattr(supervision, "_GRACE_SECONDS", 0.3)


@pytest.fixture
def _long_grace(monkeypatch):
    monkeypatch.setattr(supervision, "_GRACE_SECONDS", 3)


def orders_for(folder, worker="", **changes):
    """For two workers that run the given lines."""
    (folder / "worker_program.py").write_text(WORKER + textwrap.dedent(worker))
    orders = Orders(
        hosts=(Host("localhost", (0, 1)),),
        master_addr=None,
        master_port=0,
        environment={"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])},
        worker=("-m", "worker_program"),
        resolved="",
        working_directory=str(folder),
        log_dir=None,
        gpus=0,
        bind_cores=False,
        detect_nvlink_pairs=False,
        stop_timeout=60.0,
        hang_timeout=None,
    )
    return replace(orders, **changes)


def mpi_commands(contact):
    return [
        Command(
            argv=(*NODE, str(contact), "--mpi"),
            environment={"NEOX_TOKEN": contact.token, "PMI_RANK": str(rank), "PMI_SIZE": "2"},
        )
        for rank in range(2)
    ]


@pytest.fixture
def run(tmp_path):
    def run_lines(worker, **changes):
        return supervise(
            mpi_commands, orders_for(tmp_path, worker, **changes), is_local=True, start_timeout=60
        )

    return run_lines


def test_workers_that_end_well_end_the_launch_well(run, capfd):
    outcome = run("print('worker', rank, flush=True)")
    assert outcome.exit_code == 0
    assert outcome.first_failure is None
    assert capfd.readouterr().out == "worker 0\n"


def test_the_output_of_all_ranks_comes_with_host_and_rank(run, capfd):
    run("print(f'one {rank}\\ntwo', flush=True); print('three', file=sys.stderr, end='')", output="all")
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [
        f"{HOST} {rank}: {line}" for rank in (0, 1) for line in (f"one {rank}", "two")
    ]
    assert sorted(err.splitlines()) == [f"{HOST} {rank}: three" for rank in (0, 1)]


def test_the_output_of_other_ranks_goes_to_files(run, tmp_path, capfd):
    run("print('worker', rank)", log_dir="logs")
    assert (tmp_path / "logs" / "output" / "rank-00001.log").read_text() == "worker 1\n"
    assert [path.name for path in (tmp_path / "logs" / "output").iterdir()] == ["rank-00001.log"]
    assert capfd.readouterr().out == "worker 0\n"


def test_the_first_error_is_told_whole_and_the_others_are_ended(run):
    started = time.monotonic()
    outcome = run("if rank == 1: fail(NeoXError('the disk is full\\nmake room'))\ntime.sleep(600)")
    assert time.monotonic() - started < 60
    assert outcome.exit_code == 1
    assert outcome.first_failure.rank == 1
    assert outcome.num_failures == 1
    assert str(outcome.first_failure) == f"worker 1 on {HOST} failed:\nthe disk is full\nmake room"


def test_the_exit_code_is_that_of_the_first_of_several_failures(run, tmp_path, monkeypatch):
    monkeypatch.setattr(supervision, "_GRACE_SECONDS", 30)
    outcome = run(
        f"""
        first = pathlib.Path({str(tmp_path / "first")!r})
        if rank == 0:
            try:
                fail(ConfigError("no such thing"))
            finally:
                first.touch()
        while not first.exists():
            time.sleep(0.01)
        fail(KeyError("x"))
        """
    )
    assert outcome.exit_code == 2
    assert outcome.first_failure.message == "no such thing"
    assert outcome.num_failures == 2


def test_a_traceback_is_shown_for_what_nobody_foresaw(run):
    outcome = run("{}['missing']")
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
@pytest.mark.usefixtures("_long_grace")
def test_a_worker_that_vanishes_is_the_first_failure_and_ends_the_others(run, death, code, words):
    outcome = run(
        f"""
        dying = pathlib.Path("dying")
        if rank == 1:
            print("last words", flush=True)
            dying.touch()
            {death}
        while not dying.exists():
            time.sleep(0.01)
        time.sleep(1)
        report_failure(rank, NeoXError("the other one does not answer"))
        time.sleep(600)
        """
    )
    assert outcome.exit_code == code
    assert outcome.first_failure.rank == 1
    assert outcome.num_failures == 2
    assert words in outcome.first_failure.message
    assert "what it printed last:\nlast words" in str(outcome.first_failure)


def test_a_worker_that_leaves_with_a_code_and_no_word_is_told(run):
    outcome = run("print('oh'); sys.exit(3 if rank == 1 else 0)")
    assert outcome.exit_code == 3
    assert str(outcome.first_failure) == (
        f"worker 1 on {HOST} failed:\nit ended with exit code 3 without saying why\nwhat it printed last:\noh"
    )


def test_a_worker_that_ends_early_and_well_does_not_end_the_others(run):
    assert run("time.sleep(1.5 * rank)").exit_code == 0


def test_folders_are_private_and_go_with_the_launch(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    run(
        """
        modes = [f"{path.stat().st_mode & 0o777:o}" for path in (folder, folder / "resolved")]
        pathlib.Path(f"seen{rank}").write_text(" ".join([str(folder), *modes]))
        """,
        resolved="x",
    )
    for rank in range(2):
        folder, *modes = (tmp_path / f"seen{rank}").read_text().split()
        assert modes == ["700", "600"]
        assert folder.startswith(str(tmp_path / "tmp" / "neox-"))
    assert list((tmp_path / "tmp").iterdir()) == []


def test_workers_get_the_orders_variables_and_not_the_token(run, tmp_path):
    value = "a 'b' \"c\"; $(d)\n`e` \\ \udcff"
    orders = orders_for(tmp_path)
    run(
        """
        names = ("VALUE", "NEOX_TOKEN", "OMP_NUM_THREADS")
        pathlib.Path(f"seen{rank}").write_text(ascii([os.environ.get(name) for name in names]))
        """,
        environment={**orders.environment, "VALUE": value, "OMP_NUM_THREADS": "3"},
    )
    assert (tmp_path / "seen1").read_text() == ascii([value, None, "3"])


def test_a_host_that_does_not_come_is_named_with_what_was_said(tmp_path):
    def commands(contact):
        there = Command(
            argv=(*NODE, str(contact), "--node", "0"), environment={"NEOX_TOKEN": contact.token}, node=0
        )
        return [there, Command(argv=("sh", "-c", "echo no route to host >&2; exit 255"), node=1)]

    orders = orders_for(tmp_path, hosts=(Host("one", (0,)), Host("two", (0,))))
    outcome = supervise(commands, orders, is_local=False, start_timeout=60)
    assert outcome.exit_code == 1
    assert str(outcome.first_failure) == "two: could not be started; what was said:\nno route to host"
    assert (outcome.has_started, outcome.lost_hosts) == (False, ("two",))


def test_a_host_that_takes_too_long_is_named(tmp_path):
    def commands(contact):
        return [Command(argv=("sleep", "600"))]

    outcome = supervise(commands, orders_for(tmp_path), is_local=False, start_timeout=0.2)
    assert str(outcome.first_failure) == "localhost: did not report within 0.2 s; nothing was said"
    assert outcome.lost_hosts == ()


def test_a_host_whose_node_is_gone_is_lost_and_the_others_are_ended(run):
    """As an MPI does, the other node gets a SIGTERM that nobody has asked for."""
    outcome = run(
        """
        def has_files_open(pid):
            try:
                return bool(os.listdir(f"/proc/{pid}/fd"))
            except OSError:
                return False

        if rank == 1:
            pathlib.Path(".node").write_text(str(os.getppid()))
            pathlib.Path(".node").rename("node")
            while not pathlib.Path("ready").exists():
                time.sleep(0.01)
            os.kill(os.getppid(), signal.SIGKILL)
        while not pathlib.Path("node").exists():
            time.sleep(0.01)
        pathlib.Path("ready").touch()
        while has_files_open(pathlib.Path("node").read_text()):
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(600)
        """,
        hosts=(Host("one", (0,)), Host("two", (0,))),
    )
    assert (outcome.has_started, outcome.lost_hosts, outcome.was_stopped) == (True, ("two",), False)
    said = str(outcome.first_failure)
    assert said.startswith(f"host {HOST}: it is lost (it closed the connection), with worker 1; what it")
    assert "exclude: two " in said


def test_who_does_not_know_the_token_is_not_let_in(tmp_path):
    def commands(contact):
        return [
            Command(argv=(*NODE, str(contact), "--node", "0"), environment={"NEOX_TOKEN": "guessed"}, node=0)
        ]

    outcome = supervise(
        commands, orders_for(tmp_path, hosts=(Host("one", (0,)),)), is_local=False, start_timeout=60
    )
    assert "one: could not be started" in str(outcome.first_failure)
    assert "it closed the connection" in str(outcome.first_failure)


def test_a_busy_port_is_told_before_any_worker_starts(run, tmp_path):
    with socket.create_server(("", 0)) as taken:
        outcome = run("pathlib.Path('started').touch()", master_port=taken.getsockname()[1])
    assert outcome.exit_code == 2
    assert "cannot be used here (Address already in use)" in outcome.first_failure.message
    assert not (tmp_path / "started").exists()


def test_a_hang_is_reported_with_the_rank_that_lags_and_its_stacks(run, tmp_path):
    outcome = run(
        """
        def stuck_here():
            time.sleep(600)
        progress = Progress(rank)
        for iteration in range(1, 4 + 3 * rank):
            progress.tell(iteration)
        stuck_here()
        """,
        hang_timeout=2.0,
        log_dir="logs",
    )
    assert outcome.exit_code == 1
    [report] = (tmp_path / "logs").glob("hang-*.txt")
    assert f"rank 0 on {HOST} has done 3 iterations, others 6" in outcome.first_failure.message
    assert str(report) in outcome.first_failure.message
    text = report.read_text()
    assert "--- ranks 0-1\n" in text
    assert "in stuck_here" in text


def test_what_is_kept_up_longer_than_the_timeout_is_no_hang(run):
    """As in a save: one rank is long at work, the other waits for it."""
    outcome = run(
        """
        progress = Progress(rank)
        progress.tell(1)
        if rank == 0:
            with progress.kept_up(1):
                time.sleep(6)
            pathlib.Path("saved").touch()
        while not pathlib.Path("saved").exists():
            time.sleep(0.01)
        """,
        hang_timeout=4.0,
    )
    assert outcome.first_failure is None
    assert outcome.exit_code == 0


LAUNCHER = """
import pathlib, sys
from neox_launcher.supervision import supervise
from test_supervision import mpi_commands, orders_for
orders = orders_for(pathlib.Path(sys.argv[1]), sys.argv[2], stop_timeout=float(sys.argv[3]))
outcome = supervise(mpi_commands, orders, is_local=True, start_timeout=60)
print("outcome", outcome.exit_code, outcome.first_failure, flush=True)
sys.exit(outcome.exit_code)
"""

# Saves when it is asked to stop.
SAVING = """
def save(number, frame):
    pathlib.Path(f"saved{rank}").touch()
    sys.exit(0)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, save)
unblock_warning()
pathlib.Path(f"ready{rank}").touch()
time.sleep(600)
"""
STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(f".{rank}").write_text(str(os.getpid()))
pathlib.Path(f".{rank}").rename(f"ready{rank}")
time.sleep(600)
"""


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start(worker, folder, stop_timeout=60):
    """A launcher in a process of its own, when both workers are ready."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, folder, worker, str(stop_timeout)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": path},
    )
    wait_for(lambda: all((folder / f"ready{rank}").exists() for rank in range(2)))
    return launcher


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)],
)
def test_one_signal_lets_the_workers_save(tmp_path, number, code):
    launcher = start(SAVING, tmp_path)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == code
    assert out == f"outcome {code} None\n"
    assert all((tmp_path / f"saved{rank}").exists() for rank in range(2))
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    hint = "" if number == signal.SIGUSR1 else "; once more to stop at once"
    assert f"\n{name} received: stopping after this iteration{hint}\n" in err


def test_a_second_signal_kills(tmp_path):
    launcher = start(STUBBORN, tmp_path)
    launcher.send_signal(signal.SIGINT)
    assert "stopping" in launcher.stderr.readline() + launcher.stderr.readline()
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert out == "outcome 130 None\n"


SLOW = """
def note(number, frame):
    with open(f"seen{rank}", "a") as file:
        file.write(f"{signal.Signals(number).name}\\n")
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, note)
unblock_warning()
pathlib.Path(f".{rank}").write_text(str(os.getpid()))
pathlib.Path(f".{rank}").rename(f"ready{rank}")
while not pathlib.Path("saved").exists():
    time.sleep(0.01)
"""


def test_a_repeated_sigusr1_and_one_sigterm_let_the_workers_save(tmp_path):
    """As Slurm does: its warning goes to every process, more than once; SIGTERM comes at the time limit."""
    launcher = start(SLOW, tmp_path)
    workers = [int((tmp_path / f"ready{rank}").read_text()) for rank in range(2)]
    nodes = [int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in workers]
    for pid in [launcher.pid, *workers, *nodes] * 2:
        os.kill(pid, signal.SIGUSR1)
    assert "SIGUSR1 received: stopping" in launcher.stderr.readline() + launcher.stderr.readline()
    wait_for(lambda: all((tmp_path / f"seen{rank}").exists() for rank in range(2)))
    launcher.send_signal(signal.SIGTERM)
    assert "SIGTERM received: already" in launcher.stderr.readline() + launcher.stderr.readline()
    launcher.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    assert launcher.poll() is None
    (tmp_path / "saved").touch()
    out, _ = launcher.communicate(timeout=60)
    assert (launcher.returncode, out) == (138, "outcome 138 None\n")
    assert {(tmp_path / f"seen{rank}").read_text().split()[0] for rank in range(2)} == {"SIGUSR1"}
    assert not any("SIGTERM" in (tmp_path / f"seen{rank}").read_text() for rank in range(2))


def test_a_signal_to_a_nodes_process_is_a_request_to_the_whole_launch(tmp_path):
    launcher = start(SLOW, tmp_path)
    worker = int((tmp_path / "ready1").read_text())
    node = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(node, signal.SIGUSR1)
    wait_for(lambda: all((tmp_path / f"seen{rank}").exists() for rank in range(2)))
    (tmp_path / "saved").touch()
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 138
    assert "SIGUSR1 received: stopping after this iteration\n" in err


def test_a_program_that_saves_nothing_ends_on_sigusr1_without_a_failure(tmp_path):
    launcher = start(STUBBORN.replace("signal.signal(", "unblock_warning(); signal.signal("), tmp_path)
    launcher.send_signal(signal.SIGUSR1)
    out, _ = launcher.communicate(timeout=60)
    assert (launcher.returncode, out) == (138, "outcome 138 None\n")


def test_who_does_not_stop_in_time_is_killed_and_named(tmp_path):
    launcher = start(STUBBORN, tmp_path, stop_timeout=0.5)
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 143
    assert f"worker 1 on {HOST} had not saved within 0.5 s (stop-timeout) and had to be ended" in err


def test_workers_die_with_a_launcher_that_is_killed_and_leave_no_folder(tmp_path):
    launcher = start(STUBBORN, tmp_path)
    pids = [int((tmp_path / f"ready{rank}").read_text()) for rank in range(2)]
    launcher.kill()
    launcher.communicate()
    wait_for(lambda: not any(is_running(pid) for pid in pids))
    # The nodes' own; that of the launcher goes when the next launch looks around.
    wait_for(lambda: len(list(tmp_path.glob("neox-*"))) == 1)
    supervise(mpi_commands, orders_for(tmp_path, "pass"), is_local=True, start_timeout=60)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_torch_runs_the_workers(tmp_path):
    """The real agent around workers that need no torch."""
    pytest.importorskip("torch")

    def commands(contact):
        return [Command(argv=(*NODE, str(contact), "--node", "0"), environment={"NEOX_TOKEN": contact.token})]

    worker = """
    me = read_rank()
    if rank == 1: fail(ValueError(f"{me.local_rank} of {me.world_size}"))
    time.sleep(600)
    """
    outcome = supervise(commands, orders_for(tmp_path, worker), is_local=True, start_timeout=60)
    assert outcome.exit_code == 1
    assert outcome.first_failure.message == "ValueError: 1 of 2"
