"""The live line of real jobs on pseudo terminals."""

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.text import Text

from neox_config.errors import LaunchError
from neox_launcher.cli.launch import main
from neox_launcher.controller import live_display
from neox_launcher.controller.display import open_display
from support.refusals import refused, shows

LIMIT_SECONDS = 120

JOB = """
import os, sys
from neox_launcher.backends.base import Command
from neox_launcher.controller.display import open_display
from neox_launcher.controller.supervision import supervise
from neox_launcher.controller.terminal import finish_output
from neox_launcher.protocol.orders import Orders
from neox_launcher.resources.host import Host
orders = Orders(
    hosts=(Host("localhost", (0,)),), master_addr=None, master_port=0, environment={},
    worker=("-m", "worker_program"), resolved="", working_directory=os.getcwd(), log_dir=None, gpus=0,
    bind_cores=False, detect_nvlink_pairs=False, stop_timeout=60.0, hang_timeout=None,
)
def commands(contact):
    agent = (sys.executable, "-m", "neox_launcher.agent", "--launcher", str(contact), "--host-number", "0")
    return [Command(argv=agent, environment={"NEOX_TOKEN": contact.token}, host_number=0)]
display = open_display("auto")
outcome = supervise(
    commands, orders, is_local=True, start_timeout=60, shares_terminal=False, display=display
)
display.close()
finish_output()
sys.exit(outcome.exit_code)
"""

WORKER = """
import os, pathlib, signal, sys, time
from neox_launcher.worker.reporting import Progress
progress = Progress(0)
def say(text):
    print(text, flush=True)
def finish(iteration, **metrics):
    progress.report(iteration)
    progress.describe(phase="", iteration=iteration, last_iteration=9, metrics=metrics)
"""


class Job:
    """A job on a terminal, which is its controlling terminal unless a shell runs between."""

    def __init__(self, folder, ends, worker, environment):
        self.reading, self.writing = ends
        (folder / "worker_program.py").write_text(WORKER + worker)
        (folder / "job.py").write_text(JOB)
        paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        colours = {"TERM": "xterm-256color", "COLORTERM": ""}
        without = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        self.written = b""
        self.environment = {**without, **colours, "PYTHONPATH": paths, **environment}
        self.folder = folder

    def start(self, *command):
        self.process = subprocess.Popen(
            command or [sys.executable, "job.py"],
            cwd=self.folder,
            env=self.environment,
            preexec_fn=lambda: os.login_tty(self.writing),
        )
        return self

    def read_until(self, found):
        """Read until a text has been written, or until the job has ended (None)."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while found is None or found not in self.written:
            assert time.monotonic() < deadline, self.written
            if select.select([self.reading], [], [], 0.05)[0]:
                self.written += os.read(self.reading, 65536)
            elif self.process.poll() is not None:
                assert found is None, self.written
                break
        return self

    def end(self):
        self.read_until(None)
        return self.process.returncode


@pytest.fixture
def start(tmp_path, open_terminal):
    started = []

    def start_job(worker, columns=80, command=(), **environment):
        job = Job(tmp_path, open_terminal(columns), worker, environment)
        started.append(job.start(*command))
        return job

    yield start_job
    for job in started:
        with suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()


@pytest.mark.slow
def test_a_job_is_drawn_at_every_width_and_leaves_only_its_output(start, screen, resize, tmp_path):
    job = start(
        """
for number in range(1, 5):
    say(f"line {number} \\x1b[2A")
    finish(number, **{"loss/train": 1.5})
    progress.describe(phase=f"step {number}")
    while not pathlib.Path(f"resized-{number}").exists():
        time.sleep(0.05)
""",
        columns=80,
        COLUMNS="80",  # Exported by some shells, and wrong after the window is resized.
    )
    widths = [80, 20, 200, 40]
    for number, columns in enumerate(widths, start=1):
        resize(job.writing, columns)
        drawn_before = len(job.written)
        (tmp_path / f"resized-{number - 1}").touch()
        job.read_until(b"step %d" % number)
        screen.feed(job.written[drawn_before:])
        at_this_width = [line for line in (*screen.drawn, screen.lines[-1]) if f"step {number}" in line]
        assert all(len(line) < columns for line in at_this_width), at_this_width
        shows_loss = any(shows(line, f"iteration {number}/9", "loss 1.5000") for line in at_this_width)
        assert shows_loss == (columns >= 80)
    (tmp_path / "resized-4").touch()
    drawn_before = len(job.written)
    assert job.end() == 0
    screen.feed(job.written[drawn_before:])
    assert screen.lines == [*(f"line {number} " for number in range(1, 5)), ""]


@pytest.mark.slow
@pytest.mark.parametrize(("variables", "is_coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_no_color(start, screen, variables, is_coloured):
    job = start("say('\\x1b[35mred'); finish(1, **{'loss/train': 2.0}); time.sleep(1.5)", **variables)
    assert job.end() == 0
    assert bool(re.search(rb"\x1b\[[0-9;]+m", job.written)) == is_coloured
    assert (b"\x1b[35m" in job.written) == is_coloured
    assert screen.feed(job.written).lines == ["red", ""]


def test_a_terminal_that_stops_does_not_delay_the_job_and_gets_everything_later(start, screen, tmp_path):
    job = start('for number in range(5000): say(f"line {number}")\npathlib.Path("done").touch()')
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (tmp_path / "done").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert job.process.poll() is None
    assert job.end() == 0
    assert screen.feed(job.written).lines == [*(f"line {number}" for number in range(5000)), ""]


@pytest.mark.slow
def test_ctrl_c_is_shown_and_the_terminal_is_as_before(start, screen):
    job = start(
        """
signal.signal(signal.SIGTERM, lambda *what: (say("saving"), time.sleep(1.5), sys.exit(0)))
finish(3)
say("ready")
time.sleep(600)
"""
    )
    before = termios.tcgetattr(job.writing)
    job.read_until(b"ready")
    os.write(job.reading, b"\x03")
    assert job.end() == 130
    assert termios.tcgetattr(job.writing) == before
    lines = screen.feed(job.written.replace(b"^C", b"")).lines
    assert lines == [
        *(
            "ready",
            "",
            "Ctrl-C received: stopping after this iteration or the next; repeat to stop immediately",
        ),
        *("saving", ""),
    ]
    assert any("stopping" in line for line in screen.drawn)


def test_a_killed_launcher_leaves_a_usable_terminal(start, screen):
    job = start("finish(3)\ntime.sleep(600)")
    before = termios.tcgetattr(job.writing)
    job.read_until(b"iteration 3/9")
    job.process.kill()
    assert job.end() == -signal.SIGKILL
    assert termios.tcgetattr(job.writing) == before
    # No other screen is shown: `feed` would fail.
    assert not screen.feed(job.written).is_cursor_hidden


def test_plain_lines_where_nothing_can_be_drawn(open_terminal, monkeypatch, tmp_path):
    with Path(tmp_path / "log").open("w") as file, os.fdopen(os.dup(open_terminal(80)[1]), "w") as terminal:
        monkeypatch.setenv("TERM", "dumb")
        for stream in (file, terminal, None):
            monkeypatch.setattr(sys, "stderr", stream)
            assert open_display("auto") is None
        monkeypatch.setattr(sys, "stderr", terminal)
        with refused(LaunchError, "TERM"):
            open_display("live")
        monkeypatch.setenv("TERM", "xterm")
        assert open_display("plain") is None
        monkeypatch.setattr(os, "tcgetpgrp", lambda descriptor: os.getpgrp() + 1)
        assert open_display("live") is None
        monkeypatch.setattr(sys, "stderr", file)
        with refused(LaunchError, "terminal is live"):
            open_display("live")


@pytest.fixture
def display(open_terminal, monkeypatch):
    """A display that draws nothing."""
    monkeypatch.setattr(live_display, "start_drawing", lambda stream, open_line: None)
    with os.fdopen(os.dup(open_terminal(80)[1]), "w") as terminal:
        yield live_display.LiveDisplay(terminal)


def test_a_new_attempt_shows_no_results_of_the_one_before_but_the_end_screen_does(display):
    display.begin_attempt()
    display.show_status({"phase": "", "iteration": 7, "last_iteration": 9, "metrics": {"loss/train": 2.0}})
    assert "loss 2.0000" in display._render(80)
    display.note_iteration(8)
    display.begin_attempt()
    display.show_phase("loading")
    display.show_status({"phase": "first iteration", "iteration": 4, "last_iteration": 9, "metrics": {}})
    line = display._render(80)
    assert "iteration 4/9" in line
    assert "loss" not in line
    assert (display.highest_iteration, display.metrics) == (8, {"loss/train": 2.0})
    display.show_status({"phase": "", "iteration": 5, "last_iteration": 9, "metrics": {"loss/train": "?"}})
    assert display._render(80).plain.startswith("the live line cannot be drawn: ValueError: ")


def test_other_output_appears_in_whole_lines_above_the_line(screen, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    written = io.StringIO()
    line = live_display._LiveLine(written, lambda width: Text("drawn"))
    line.start()
    for source, data in (
        *(("a", b"one\nha"), ("b", b"10%\r20%\r"), ("a", b"lf\r\n\x1b[2Aend"), ("b", b"\n")),
        ("c", b"x" * (live_display._HOLD_BYTES + 1)),
    ):
        line.write(source, data)
    line.stop()
    long = "x" * (live_display._HOLD_BYTES + 1)
    assert screen.feed(written.getvalue().encode()).lines == ["one", "half", "20%", long, "end", ""]
    assert "drawn" in screen.drawn
    assert not screen.is_cursor_hidden


def test_the_line_is_drawn_before_other_output_can_come(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    written = io.StringIO()
    # The thread that draws it again waits.
    monkeypatch.setattr("rich.live._RefreshThread.run", lambda thread: None)
    line = live_display._LiveLine(written, lambda width: Text("drawn"))
    line.start()
    assert "drawn" in written.getvalue()
    line.stop()


def test_only_a_live_line_imports_rich():
    program = "import sys, neox_launcher.cli.launch; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.slow
def test_a_bar_of_a_worker_and_a_message_of_the_launcher_do_not_share_a_line(start, screen):
    job = start(
        """
sys.stderr.write("\\r 45%|##")
sys.stderr.flush()
finish(3)
time.sleep(1)
say("ready")
time.sleep(600)
"""
    )
    job.read_until(b"ready")
    os.write(job.reading, b"\x03")
    assert job.end() == 130
    lines = screen.feed(job.written.replace(b"^C", b"")).lines
    assert shows(lines, "Ctrl-C received")
    assert " 45%|##" in lines


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("program", [(), ("evaluate",)])
def test_a_dry_run_refuses_a_terminal_that_a_training_refuses(minimal, program):
    options = ["--dry-run=json", "--set", "terminal=live", "--set", "num-gpus=1"]
    found = CliRunner().invoke(main, [*program, str(minimal), *options])
    assert ("terminal is live" in found.stderr) == (not program)
    assert any("terminal is live" in each for each in json.loads(found.stdout)["problems"]) == (not program)
