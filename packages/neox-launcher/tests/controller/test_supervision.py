"""Supervision of workers, with real agents, processes and signals, started as under MPI."""

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from neox_launcher.backends.base import Command
from neox_launcher.controller import supervision
from neox_launcher.controller.display import Display
from neox_launcher.controller.supervision import supervise
from neox_launcher.plan.plan import ANY_ENDPOINT
from neox_launcher.protocol.messages import own_version
from neox_launcher.protocol.orders import Orders
from neox_launcher.resources.host import Host
from support.refusals import refused, shows
from support.tiers import slow_except

HOST = os.uname().nodename
AGENT = (sys.executable, "-m", "neox_launcher.agent", "--launcher")

WORKER = """
import os, pathlib, signal, sys, time
from neox_config.errors import ConfigError, NeoXError
from neox_launcher.worker.ranks import read_rank
from neox_launcher.protocol.stop_signals import unblock_warning
from neox_launcher.worker.reporting import Progress, report_failure
rank = read_rank().rank
folder = pathlib.Path(os.environ["NEOX_RUN_DIR"])

def meet():
    pathlib.Path(f"here{rank}").touch()
    while not all(pathlib.Path(f"here{other}").exists() for other in range(2)):
        time.sleep(0.01)

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
    """Return orders for two workers that run the given lines."""
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


def agent_of(contact, number):
    return (*AGENT, str(contact), "--host-number", str(number))


def mpi_commands(contact):
    return [
        Command(
            argv=(*AGENT, str(contact), "--mpi"),
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


def test_a_launch_succeeds_if_all_workers_succeed(run, capfd):
    outcome = run("print('worker', rank, flush=True)")
    assert outcome.exit_code == 0
    assert outcome.first_failure is None
    assert capfd.readouterr().out == "worker 0\n"


def test_the_output_of_all_ranks_is_prefixed_with_host_and_rank(run, capfd):
    run("print(f'one {rank}\\ntwo', flush=True); print('three', file=sys.stderr, end='')", output="all")
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [
        f"{HOST} {rank}: {line}" for rank in (0, 1) for line in (f"one {rank}", "two")
    ]
    assert sorted(err.splitlines()) == [f"{HOST} {rank}: three" for rank in (0, 1)]


def logs_in(folder):
    return {path.name: path.read_text() for path in (folder / "output").iterdir()}


@pytest.mark.parametrize("output", ["rank0", "all"])
def test_a_training_logs_the_output_of_every_rank_and_shows_the_same_as_before(run, tmp_path, capfd, output):
    run("print('worker', rank, flush=True); sys.stderr.write('warning: ')", log_dir="logs", output=output)
    logs = {f"rank-0000{rank}.log": f"worker {rank}\nwarning: " for rank in (0, 1)}
    assert logs_in(tmp_path / "logs") == logs
    out, err = capfd.readouterr()
    shown = [(f"{HOST} {rank}: ", rank) for rank in (0, 1)] if output == "all" else [("", 0)]
    assert sorted(out.splitlines()) == [f"{prefix}worker {rank}" for prefix, rank in shown]
    assert err.count("warning: ") == len(shown)
    run("print('again')", log_dir="logs", output=output)
    assert logs_in(tmp_path / "logs") == {name: f"{text}again\n" for name, text in logs.items()}


def test_other_programs_log_the_output_of_the_ranks_that_are_not_shown(run, tmp_path, capfd):
    run("print('worker', rank)", log_dir="logs", is_training=False)
    assert logs_in(tmp_path / "logs") == {"rank-00001.log": "worker 1\n"}
    assert capfd.readouterr().out == "worker 0\n"


def test_the_first_error_is_reported_in_full_and_the_others_are_ended(run):
    started = time.monotonic()
    outcome = run("if rank == 1: fail(NeoXError('the disk is full\\nmake room'))\ntime.sleep(600)")
    assert time.monotonic() - started < 60
    assert outcome.exit_code == 1
    assert outcome.first_failure.rank == 1
    assert outcome.num_failures == 1
    assert shows(outcome.first_failure, "worker 1", f"{HOST} failed")


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


def test_a_traceback_is_shown_for_unexpected_exceptions(run):
    outcome = run("{}['missing']")
    assert "KeyError: 'missing'" in str(outcome.first_failure)
    assert "Traceback" in str(outcome.first_failure)


DEATHS = [
    ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL; the host may have run out of memory"),
    ("os.abort()", 134, "terminated by SIGABRT"),
    ("os._exit(7)", 7, "exited with code 7 without reporting an error"),
    ("os._exit(0)", 1, "exited with code 0 before the end of its program"),
]


@pytest.mark.parametrize(("death", "code", "words"), slow_except(DEATHS, DEATHS[0]))
@pytest.mark.usefixtures("_long_grace")
def test_a_worker_that_dies_is_the_first_failure_and_ends_the_others(run, death, code, words):
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
    assert "last words" in str(outcome.first_failure)


def test_a_worker_that_exits_without_a_report_is_reported(run):
    outcome = run("print('oh'); sys.exit(3 if rank == 1 else 0)")
    assert outcome.exit_code == 3
    assert shows(outcome.first_failure, "worker 1", f"{HOST} failed", "3 without")


@pytest.mark.slow
def test_a_worker_that_succeeds_early_does_not_end_the_others(run):
    assert run("time.sleep(1.5 * rank)").exit_code == 0


def test_folders_are_private_and_removed_with_the_launch(run, tmp_path, monkeypatch):
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


def test_a_host_that_cannot_be_started_is_named_with_the_output(tmp_path):
    def commands(contact):
        there = Command(argv=agent_of(contact, 0), environment={"NEOX_TOKEN": contact.token}, host_number=0)
        return [there, Command(argv=("sh", "-c", "echo no route to host >&2; exit 255"), host_number=1)]

    orders = orders_for(tmp_path, hosts=(Host("one", (0,)), Host("two", (0,))))
    outcome = supervise(commands, orders, is_local=False, start_timeout=60)
    assert outcome.exit_code == 1
    assert shows(outcome.first_failure, "two: could not", "no route to")
    assert (outcome.has_started, outcome.lost_hosts) == (False, ("two",))


def test_a_host_that_does_not_report_in_time_is_named(tmp_path):
    def commands(contact):
        return [Command(argv=("sleep", "600"))]

    outcome = supervise(commands, orders_for(tmp_path), is_local=False, start_timeout=0.2)
    assert shows(outcome.first_failure, "within 0.2 s")
    assert outcome.lost_hosts == ()


def test_a_host_that_a_scheduler_starts_and_does_not_report_is_named(tmp_path):
    outcome = supervise(lambda contact: [], orders_for(tmp_path), is_local=False, start_timeout=0.2)
    assert shows(outcome.first_failure, "within 0.2 s")


def test_a_host_whose_agent_is_gone_is_lost_and_the_others_are_ended(run):
    """As with an MPI, the other agent receives a SIGTERM that is not a request to stop."""
    outcome = run(
        """
        def has_files_open(pid):
            try:
                return bool(os.listdir(f"/proc/{pid}/fd"))
            except OSError:
                return False

        if rank == 1:
            pathlib.Path(".agent").write_text(str(os.getppid()))
            pathlib.Path(".agent").rename("agent")
            while not pathlib.Path("ready").exists():
                time.sleep(0.01)
            os.kill(os.getppid(), signal.SIGKILL)
        while not pathlib.Path("agent").exists():
            time.sleep(0.01)
        pathlib.Path("ready").touch()
        while has_files_open(pathlib.Path("agent").read_text()):
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(600)
        """,
        hosts=(Host("one", (0,)), Host("two", (0,))),
    )
    assert (outcome.has_started, outcome.lost_hosts, outcome.was_stopped) == (True, ("two",), False)
    said = str(outcome.first_failure)
    assert said.startswith(
        f"host {HOST}: agent lost (it closed the connection), with worker 1; workers still"
    )
    assert "exclude: two " in said


@pytest.mark.slow
def test_an_agent_without_the_token_is_refused(tmp_path):
    def commands(contact):
        return [Command(argv=agent_of(contact, 0), environment={"NEOX_TOKEN": "guessed"}, host_number=0)]

    outcome = supervise(
        commands, orders_for(tmp_path, hosts=(Host("one", (0,)),)), is_local=False, start_timeout=60
    )
    assert "one: could not" in str(outcome.first_failure)
    assert "closed the connection" in str(outcome.first_failure)


def test_a_used_port_is_reported_before_any_worker_starts(run, tmp_path):
    with socket.create_server(("", 0)) as taken:
        outcome = run("pathlib.Path('started').touch()", master_port=taken.getsockname()[1])
    assert outcome.exit_code == 2
    assert "Address already in" in outcome.first_failure.message
    assert not (tmp_path / "started").exists()


def test_rank_0_inherits_the_listening_socket_of_its_agent(run, capfd):
    """So that no other process can take the port first."""
    outcome = run(
        """
        import socket
        held = read_rank().store_socket
        print(rank, held and socket.socket(fileno=held).getsockname()[1] == read_rank().master_port)
        """,
        output="all",
    )
    assert outcome.exit_code == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [f"{HOST} 0: 0 True", f"{HOST} 1: 1 None"]


@pytest.mark.slow
def test_a_hang_is_reported_with_the_rank_that_lags_and_its_stacks(run, tmp_path):
    outcome = run(
        """
        def stuck_here():
            time.sleep(600)
        progress = Progress(rank)
        meet()
        for iteration in range(1, 4 + 3 * rank):
            progress.report(iteration)
        stuck_here()
        """,
        hang_timeout=8.0,
        log_dir="logs",
    )
    assert outcome.exit_code == 1
    [report] = (tmp_path / "logs").glob("hang-*.txt")
    assert shows(outcome.first_failure.message, "rank 0", HOST, "3 iterations")
    assert str(report) in outcome.first_failure.message
    recorded = [json.loads(line) for line in (tmp_path / "logs" / "failures.jsonl").read_text().splitlines()]
    assert [one["message"] for one in recorded if one["rank"] is None] == [outcome.first_failure.message]
    text = report.read_text()
    assert "--- ranks 0-1\n" in text
    assert "in stuck_here" in text


@pytest.mark.slow
def test_a_stopped_worker_is_named_by_the_hang_report(run):
    outcome = run(
        """
        progress = Progress(rank)
        meet()
        progress.report(4)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
        """,
        hang_timeout=8.0,
    )
    said = outcome.first_failure.message
    assert shows(said, "rank 1", HOST, "SIGSTOP")
    assert "rank 0" not in said
    assert outcome.iteration == 4


@pytest.mark.slow
def test_a_hang_before_the_first_iteration_is_reported(run, tmp_path):
    outcome = run("time.sleep(600)", first_iteration_timeout=8.0, hang_timeout=600.0)
    assert outcome.exit_code == 1
    assert shows(outcome.first_failure.message, "8 s", "(first-iteration-timeout)")
    [report] = tmp_path.glob("hang-*.txt")
    assert re.search(rf"1 +{HOST} +none ", report.read_text())


@pytest.fixture
def launch(tmp_path):
    """Return a launch without agents, which has no time for its first iteration."""
    with selectors.DefaultSelector() as selector:
        orders = orders_for(tmp_path, first_iteration_timeout=-1.0)
        launch = supervision._Launch(
            orders, selector, is_local=True, start_timeout=60, endpoint=ANY_ENDPOINT, token="t"
        )
        yield launch
        launch._listener.close()


def test_progress_while_stacks_are_reported_is_no_hang(launch):
    launch._hang.start()
    launch._look_for_hang()
    assert launch._dump_by is not None
    launch._hang.hear(0, 1)
    launch._look_for_hang()
    assert (launch._failures, launch._dump_by) == ([], None)


def test_agents_do_not_report_success_if_the_launcher_fails(launch, monkeypatch):
    """Their exit code is that of the processes that a scheduler started."""

    def fail(tools):
        raise RuntimeError("unexpected")

    sent = []
    monkeypatch.setattr(launch, "_turn", fail)
    monkeypatch.setattr(launch._agents, "send_all", lambda *message: sent.append(message))
    with refused(RuntimeError, "unexpected"):
        launch.run([])
    assert sent == [("leave", {"exit_code": 1})]


def test_the_last_iteration_is_known_when_a_worker_fails_at_once(run):
    outcome = run("Progress(rank).report(41 + rank)\nif rank: fail(NeoXError('nan'))\ntime.sleep(600)")
    assert (outcome.iteration, outcome.first_failure.rank) == (42, 1)


@pytest.mark.slow
def test_a_lost_agent_is_not_blamed_on_a_worker_that_notices_first(run, monkeypatch):
    """As on a busy launch host, which reads that the connection is closed after the error of the worker."""
    monkeypatch.setattr(supervision, "_GRACE_SECONDS", 20)
    outcome = run(
        """
        if rank == 0:
            pathlib.Path("noticed").touch()
            fail(ConnectionError("closed by peer"))
        while not pathlib.Path("noticed").exists():
            time.sleep(0.01)
        time.sleep(1.5)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
        """
    )
    assert str(outcome.first_failure).startswith(f"host {HOST}: agent lost (it closed the connection)")


def one_agent(contact):
    return [Command(argv=agent_of(contact, 0), environment={"NEOX_TOKEN": contact.token}, host_number=0)]


def test_a_killed_worker_keeps_its_exit_code_when_the_disk_is_full(tmp_path):
    worker = """
    import errno
    from neox_launcher.worker import reporting
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    reporting.write_aside = full
    def is_gone(pid):
        try:
            return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True
    if rank == 1:
        pathlib.Path(".1").write_text(str(os.getpid()))
        pathlib.Path(".1").rename("one")
        os.kill(os.getpid(), signal.SIGKILL)
    while not pathlib.Path("one").exists() or not is_gone(pathlib.Path("one").read_text()):
        pass
    fail(ConnectionError("closed by peer"))
    """
    outcome = supervise(one_agent, orders_for(tmp_path, worker), is_local=True, start_timeout=60)
    assert outcome.first_failure.rank == 1
    assert outcome.exit_code == 137


@pytest.mark.parametrize("end", ["os._exit(0)", "os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_processes_of_a_worker_that_has_ended_end_with_the_launch(run, tmp_path, end):
    run(
        f"""
        import subprocess
        if rank == 1:
            child = subprocess.Popen(["sleep", "600"])
            pathlib.Path("child").write_text(str(child.pid))
            {end}
        """
    )
    wait_for(lambda: not is_running(int((tmp_path / "child").read_text())))


@pytest.mark.slow
def test_repeated_progress_is_no_hang(run):
    """As in a save: one rank works for a long time, and the other waits for it."""
    outcome = run(
        """
        progress = Progress(rank)
        meet()
        progress.report(1)
        if rank == 0:
            with progress.repeated(1):
                time.sleep(7)
            pathlib.Path("saved").touch()
        while not pathlib.Path("saved").exists():
            time.sleep(0.01)
        """,
        hang_timeout=5.0,
    )
    assert outcome.first_failure is None
    assert outcome.exit_code == 0


# Programs of these tests import this file, and it imports `support`.
FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parents[4] / "tests")]
LAUNCHER = """
import json, os, pathlib, sys
from neox_launcher.controller import supervision
from neox_launcher.controller.supervision import supervise
from test_supervision import mpi_commands, orders_for
orders = orders_for(pathlib.Path(sys.argv[1]), sys.argv[2], **json.loads(sys.argv[3]))
if "NO_REPEATS" in os.environ:
    supervision._REPEAT_SECONDS = 0.0
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


def start(worker, folder, **changes):
    """Start a launcher process, and return it when both workers are ready."""
    path = os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, folder, worker, json.dumps(changes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As a shell does for each job; otherwise the kernel may ignore SIGTSTP.
        process_group=0,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": path},
    )
    wait_for(lambda: all((folder / f"ready{rank}").exists() for rank in range(2)))
    return launcher


SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)]


@pytest.mark.parametrize(("number", "code"), slow_except(SIGNALS, SIGNALS[1]))
def test_one_signal_lets_the_workers_save(tmp_path, number, code):
    launcher = start(SAVING, tmp_path)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == code
    assert out == f"outcome {code} None\n"
    assert all((tmp_path / f"saved{rank}").exists() for rank in range(2))
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    hint = "" if number == signal.SIGUSR1 else "; repeat to stop immediately"
    assert shows(err, f"{name} received", f"next{hint}")


@pytest.fixture
def _no_repeats(monkeypatch):
    """Count every signal as a new request to stop, so that no test waits for a second."""
    monkeypatch.setenv("NO_REPEATS", "1")


@pytest.mark.usefixtures("_no_repeats")
def test_a_second_signal_kills(tmp_path):
    launcher = start(STUBBORN, tmp_path)
    launcher.send_signal(signal.SIGINT)
    assert "stopping" in launcher.stderr.readline() + launcher.stderr.readline()
    launcher.send_signal(signal.SIGINT)
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert out == "outcome 130 None\n"
    assert err.endswith("\nCtrl-C received again: stopping immediately; what is not saved is lost\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_arrives_twice_lets_the_workers_save(tmp_path, number):
    """As from `timeout`, which signals its command and then the process group of its command."""
    launcher = start(SAVING, tmp_path)
    launcher.send_signal(number)
    time.sleep(0.05)
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + number
    assert all((tmp_path / f"saved{rank}").exists() for rank in range(2))
    assert "immediately; what" not in err


@pytest.mark.parametrize(("seconds", "num_requests"), [(0.5, 1), (2.0, 2)])
def test_signals_within_a_second_are_one_request(launch, monkeypatch, seconds, num_requests):
    now = [100.0]
    monkeypatch.setattr(supervision.time, "monotonic", lambda: now[0])
    launch._remember(signal.SIGTERM, None)
    now[0] += seconds
    launch._remember(signal.SIGTERM, None)
    assert launch._signals == [signal.SIGTERM] * num_requests


# Is still loading, so that a signal ends it.
LOADING = """
pathlib.Path(f"ready{rank}").touch()
time.sleep(600)
"""


def test_a_stop_while_loading_is_described_and_is_no_failure(tmp_path):
    launcher = start(LOADING, tmp_path, log_dir="logs")
    launcher.send_signal(signal.SIGTERM)
    out, err = launcher.communicate(timeout=60)
    assert (launcher.returncode, out) == (143, "outcome 143 None\n")
    assert err.endswith("stopped while the run was loading: nothing was saved\n")
    assert not (tmp_path / "logs" / "failures.jsonl").exists()


@pytest.mark.parametrize("is_training", [True, False])
def test_failures_of_trainings_alone_are_in_the_record_of_the_run(run, tmp_path, is_training):
    outcome = run("fail(NeoXError('the port is in use'))", log_dir="logs", is_training=is_training)
    assert "port is in" in outcome.first_failure.message
    assert (tmp_path / "logs" / "failures.jsonl").exists() == is_training


def test_a_start_refused_because_another_training_runs_is_no_failure_of_the_run(run, tmp_path):
    worker = """
    class InUse(NeoXError):
        is_refused_start = True
    fail(InUse('another saves there'))
    """
    outcome = run(worker, log_dir="logs")
    assert (outcome.exit_code, outcome.first_failure.message) == (1, "another saves there")
    assert not (tmp_path / "logs" / "failures.jsonl").exists()


@pytest.mark.slow
def test_an_error_after_a_request_to_stop_is_recorded(tmp_path):
    worker = SAVING.replace("sys.exit(0)", "fail(NeoXError('the disk is full'))")
    launcher = start(worker, tmp_path, log_dir="logs")
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=60)
    lines = (tmp_path / "logs" / "failures.jsonl").read_text().splitlines()
    assert {json.loads(line)["message"] for line in lines} == {"the disk is full"}


SAVES_SHORTLY = """
progress = Progress(rank)
with progress.phase("saving iteration 90", iteration=90):
    time.sleep(0.6)
progress.describe(phase="finishing", iteration=92)
time.sleep(0.6)
"""


@pytest.mark.slow
def test_the_display_follows_short_phases_and_shows_no_old_one_at_the_end(tmp_path):
    class Seen(Display):
        def __init__(self):
            super().__init__()
            self.phases = []

        def show_phase(self, phase):
            self.phases.append(phase)

        def show_status(self, status):
            self.phases.append(status["phase"])

    seen = Seen()
    orders = orders_for(tmp_path, SAVES_SHORTLY)
    supervise(mpi_commands, orders, is_local=True, start_timeout=60, display=seen)
    assert seen.phases == ["starting 1 host", "loading", "saving iteration 90", "finishing", "ending"]


# Two replies that Ctrl-C ends, and a prompt.
TALKING = """
from neox_launcher.worker.reporting import interruptible
interrupts = []
def interrupt(number, frame):
    interrupts.append(number)
    pathlib.Path("interrupted").touch()
signal.signal(signal.SIGINT, interrupt)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
for reply in range(2 if rank == 0 else 0):
    with interruptible(rank, reply):
        pathlib.Path("ready0").touch()
        pathlib.Path(f"reply{reply}").touch()
        while not interrupts or pathlib.Path("slow").exists():
            time.sleep(0.01)
        interrupts.clear()
pathlib.Path("prompt" if rank == 0 else "ready1").touch()
time.sleep(600)
"""


@pytest.mark.slow
def test_ctrl_c_ends_the_reply_and_at_the_prompt_the_session(tmp_path):
    launcher = start(TALKING, tmp_path, is_interactive=True, is_training=False)
    for following in ("reply1", "prompt"):
        launcher.send_signal(signal.SIGINT)
        wait_for((tmp_path / following).exists)
    launcher.send_signal(signal.SIGINT)
    out, err = launcher.communicate(timeout=60)
    assert (launcher.returncode, out) == (130, "outcome 130 None\n")
    assert shows(err, "Ctrl-C received")


@pytest.mark.slow
def test_a_second_ctrl_c_during_a_reply_ends_the_session(tmp_path):
    (tmp_path / "slow").touch()
    launcher = start(TALKING, tmp_path, is_interactive=True, is_training=False)
    launcher.send_signal(signal.SIGINT)
    wait_for((tmp_path / "interrupted").exists)
    launcher.send_signal(signal.SIGINT)
    out, err = launcher.communicate(timeout=60)
    assert (launcher.returncode, out) == (130, "outcome 130 None\n")
    assert shows(err, "Ctrl-C received")
    assert not (tmp_path / "reply1").exists()


def test_ctrl_c_stops_the_job_if_the_agent_of_a_reply_does_not_answer(launch, monkeypatch):
    launch._orders = replace(launch._orders, is_interactive=True, is_training=False)
    launch._is_started = True
    for _ in range(3):
        launch._remember(signal.SIGINT, None)
    assert (launch._interrupts_received, launch._signals) == (2, [signal.SIGINT])


WAITING = """
pathlib.Path(f"ready{rank}").touch()
while not pathlib.Path("over").exists():
    time.sleep(0.01)
"""


def test_ctrl_z_does_not_stop_the_launcher(tmp_path):
    launcher = start(WAITING, tmp_path)
    launcher.send_signal(signal.SIGTSTP)
    time.sleep(0.2)
    assert state_of(launcher.pid) != "T"
    (tmp_path / "over").touch()
    out, _ = launcher.communicate(timeout=60)
    assert (launcher.returncode, out) == (0, "outcome 0 None\n")


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


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
    """As Slurm does: it signals every process repeatedly, and sends SIGTERM at the time limit."""
    launcher = start(SLOW, tmp_path)
    workers = [int((tmp_path / f"ready{rank}").read_text()) for rank in range(2)]
    agents = [int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in workers]
    for pid in [launcher.pid, *workers, *agents] * 2:
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


def test_a_signal_to_an_agent_stops_the_whole_launch(tmp_path):
    launcher = start(SLOW, tmp_path)
    worker = int((tmp_path / "ready1").read_text())
    agent = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGUSR1)
    wait_for(lambda: all((tmp_path / f"seen{rank}").exists() for rank in range(2)))
    (tmp_path / "saved").touch()
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 138
    assert "SIGUSR1 received" in err


# Holds rank 1 back before it registers with its agent.
HELD = """
import os, pathlib, time
while os.environ.get("RANK") == "1" and not pathlib.Path("go").exists():
    pathlib.Path("ready1").touch()
    time.sleep(0.01)
"""
# Stops once all workers have joined, as a run does that is still loading when SIGUSR1 comes.
JOINING = """
pathlib.Path(f"joined{rank}").touch()
pathlib.Path(f"ready{rank}").touch()
while not all(pathlib.Path(f"joined{other}").exists() for other in range(2)):
    time.sleep(0.01)
signal.sigwait({signal.SIGUSR1})
pathlib.Path(f"stopped{rank}").touch()
"""


@pytest.mark.slow
def test_a_sigusr1_reaches_workers_that_register_after_it(tmp_path):
    """Hosts at different stages of loading stop together, without waiting for `stop-timeout`."""
    (tmp_path / "sitecustomize.py").write_text(HELD)
    launcher = start(JOINING, tmp_path)
    launcher.send_signal(signal.SIGUSR1)
    assert "SIGUSR1 received: stopping" in launcher.stderr.readline() + launcher.stderr.readline()
    time.sleep(1.0)
    assert launcher.poll() is None
    (tmp_path / "go").touch()
    out, err = launcher.communicate(timeout=50)
    assert (launcher.returncode, out) == (138, "outcome 138 None\n")
    assert "stop-timeout" not in err
    assert all((tmp_path / f"stopped{rank}").exists() for rank in range(2))


def test_a_program_that_saves_nothing_ends_on_sigusr1_without_a_failure(tmp_path):
    launcher = start(STUBBORN.replace("signal.signal(", "unblock_warning(); signal.signal("), tmp_path)
    launcher.send_signal(signal.SIGUSR1)
    out, _ = launcher.communicate(timeout=60)
    assert (launcher.returncode, out) == (138, "outcome 138 None\n")


def test_a_worker_that_does_not_stop_in_time_is_killed_and_named(tmp_path):
    launcher = start(STUBBORN, tmp_path, stop_timeout=0.5)
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 143
    assert shows(err, "worker 1", HOST, "0.5 s")


def test_workers_die_with_a_launcher_that_is_killed_and_leave_no_folder(tmp_path):
    launcher = start(STUBBORN, tmp_path)
    pids = [int((tmp_path / f"ready{rank}").read_text()) for rank in range(2)]
    launcher.kill()
    launcher.communicate()
    wait_for(lambda: not any(is_running(pid) for pid in pids))
    # The agents' own; that of the launcher goes when the next launch looks around.
    wait_for(lambda: len(list(tmp_path.glob("neox-*"))) == 1)
    supervise(mpi_commands, orders_for(tmp_path, "pass"), is_local=True, start_timeout=60)


UNREAD = """
line = b"x" * 999 + b"\\n"
for _ in range(4000):
    os.write(1, line)
pathlib.Path(f"through{rank}").touch()
while not all(pathlib.Path(f"through{other}").exists() for other in range(2)):
    time.sleep(0.01)
pathlib.Path(f"ready{rank}").touch()
"""


def test_a_launcher_whose_output_is_not_read_lets_the_workers_finish(tmp_path):
    """As with a pager that the user has left, or a pipe that hangs."""
    launcher = start(UNREAD, tmp_path)
    assert launcher.stdout.read(5) == "xxxxx"
    launcher.stdout.close()
    assert launcher.wait(timeout=60) == 0


@pytest.mark.slow
def test_a_slow_reader_gets_all_output(tmp_path):
    """As results that are piped to a slow program: more than the queues hold."""
    ready = 'pathlib.Path(f"ready{rank}").touch()\n'
    launcher = start(ready + UNREAD.replace("4000", "24_000 if rank == 0 else 1"), tmp_path)
    read = []
    while data := os.read(launcher.stdout.fileno(), 65_536):
        read.append(data)
        time.sleep(0.003)
    assert launcher.wait(timeout=60) == 0
    assert b"".join(read).startswith((b"x" * 999 + b"\n") * 24_000 + b"outcome 0")


def test_a_full_disk_under_log_dir_is_a_warning(run, tmp_path, capfd):
    (tmp_path / "logs" / "output").mkdir(parents=True)
    (tmp_path / "logs" / "output" / "rank-00001.log").symlink_to("/dev/full")
    outcome = run("print('worker', rank)", log_dir="logs")
    assert (outcome.exit_code, outcome.first_failure) == (0, None)
    out, err = capfd.readouterr()
    assert out == "worker 0\n"
    assert "rank-00001.log cannot be" in err


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_an_agent_of_one_host_runs_all_its_workers(tmp_path):
    """A real agent with workers that do not use torch."""
    pytest.importorskip("torch")

    def commands(contact):
        return [Command(argv=agent_of(contact, 0), environment={"NEOX_TOKEN": contact.token})]

    worker = """
    me = read_rank()
    if rank == 1: fail(ValueError(f"{me.local_rank} of {me.world_size}"))
    time.sleep(600)
    """
    outcome = supervise(commands, orders_for(tmp_path, worker), is_local=True, start_timeout=60)
    assert outcome.exit_code == 1
    assert shows(outcome.first_failure.message, "ValueError: 1", "2")


OLD_AGENT = """
import sys
from neox_launcher.agent.agent import main
from neox_launcher.protocol import handshake
handshake.own_version = lambda: "0.0.1 (messages 00000000)"
main()
"""


def test_hosts_with_another_version_are_named_with_both_versions(tmp_path):
    def commands(contact):
        return [
            Command(
                argv=(sys.executable, "-c", OLD_AGENT, *agent_of(contact, number)[3:]),
                environment={"NEOX_TOKEN": contact.token},
                host_number=number,
            )
            for number in range(2)
        ]

    orders = orders_for(tmp_path, hosts=(Host("one", (0,)), Host("two", (0,))))
    outcome = supervise(commands, orders, is_local=False, start_timeout=60)
    assert outcome.exit_code == 2
    assert shows(
        outcome.first_failure, f"host {HOST}", "neox-launcher 0.0.1", "00000000", f"host {own_version()}"
    )
    assert outcome.other_versions == {HOST: "0.0.1 (messages 00000000)"}
    assert not outcome.has_started


# The agents start when the guests are connected.
CROWDED = """
import pathlib, resource, socket, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from dataclasses import replace
from neox_launcher.controller.supervision import supervise
from test_supervision import mpi_commands, orders_for
orders = orders_for(pathlib.Path(sys.argv[1]), "print('worker', rank, flush=True)")

def commands(contact):
    pathlib.Path(sys.argv[1], ".port").write_text(str(contact.port))
    pathlib.Path(sys.argv[1], ".port").rename(pathlib.Path(sys.argv[1], "port"))
    wait = f'while [ ! -e {sys.argv[1]}/crowded ]; do sleep 0.05; done; exec "$@"'
    return [replace(one, argv=("sh", "-c", wait, "sh", *one.argv)) for one in mpi_commands(contact)]

outcome = supervise(commands, orders, is_local=True, start_timeout=60)
print("outcome", outcome.exit_code, outcome.first_failure, flush=True)
"""


def test_more_idle_connections_than_file_descriptors_do_not_disturb_a_launch(tmp_path):
    path = os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])
    launcher = subprocess.Popen(
        [sys.executable, "-c", CROWDED, tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": path},
    )
    wait_for((tmp_path / "port").exists)
    port = int((tmp_path / "port").read_text())
    guests = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
    (tmp_path / "crowded").touch()
    out, err = launcher.communicate(timeout=120)
    for guest in guests:
        guest.close()
    assert out == "worker 0\noutcome 0 None\n"
    assert "connection from 127.0.0.1" in err
    assert "Traceback" not in err


def test_the_port_is_closed_once_all_agents_are_connected(tmp_path):
    def commands(contact):
        (tmp_path / "port").write_text(str(contact.port))
        return mpi_commands(contact)

    worker = f"""
        import errno, socket
        port = int(pathlib.Path({str(tmp_path / "port")!r}).read_text())
        assert socket.socket().connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED
        """
    outcome = supervise(commands, orders_for(tmp_path, worker), is_local=True, start_timeout=60)
    assert outcome.first_failure is None
