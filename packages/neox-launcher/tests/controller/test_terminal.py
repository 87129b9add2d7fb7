"""Closed readers and terminals do not end a job."""

import os
import subprocess
import sys
import threading

from neox_launcher.controller import terminal
from neox_launcher.controller.terminal import pass_on, print_message, settle_output

PROGRAM = """
import sys
from neox_launcher.controller.terminal import finish_output, pass_on
sys.stdin.readline()
for _ in range(3):
    pass_on(sys.stdout, b"words" * 1000)
finish_output()
sys.stderr.write("on")
"""


def test_output_keeps_its_order(capfdbinary):
    sys.stdout.write("first ")
    pass_on(sys.stdout, b"second \xff")
    print_message("aside")
    settle_output()
    assert capfdbinary.readouterr() == (b"first second \xff", b"aside")


def test_output_without_a_stream_is_discarded():
    pass_on(None, b"words")


def test_a_closed_reader_does_not_end_the_job():
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ,
    )
    program.stdout.close()
    _, err = program.communicate(b"\n", timeout=60)
    assert (program.returncode, err) == (0, b"on")


STOPPED = """
import sys
from neox_launcher.controller import terminal
terminal._PATIENCE_SECONDS = 1.0
for _ in range(100):
    terminal.pass_on(sys.stdout, b"words" * 10_000)
terminal.print_message("the end")
terminal.finish_output()
print("on")
"""


def test_a_reader_that_stops_does_not_stop_the_job_and_what_it_leaves_is_kept(tmp_path):
    program = subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    )
    said = program.stderr.read().decode()
    assert program.wait(timeout=60) == 0
    [unread] = tmp_path.glob("neox-launch-unread-*.log")
    size = f"{unread.stat().st_size:,}"
    assert said == f"the end\nneox-launch: {size} bytes of output were not read; they are in {unread}\n"
    assert len(program.stdout.read()) + unread.stat().st_size >= 5_000_000
    assert set(unread.read_bytes()) == set(b"words")


def test_unread_output_that_cannot_be_kept_is_reported_as_lost():
    program = subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/proc"
    )
    assert program.stderr.read().endswith(b".log cannot be written: No such file or directory\n")
    assert program.wait(timeout=60) == 0


def test_a_file_server_that_hangs_does_not_keep_the_job_from_ending(tmp_path, monkeypatch):
    has_ended = threading.Event()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(terminal.Path, "write_bytes", lambda path, data: has_ended.wait())
    monkeypatch.setattr(terminal, "_KEEP_SECONDS", 0.1)
    try:
        assert terminal._keep(b"words") == f"they are lost, because {tmp_path} does not answer"
    finally:
        has_ended.set()


def test_a_slow_reader_gets_everything_up_to_the_limit():
    lines = STOPPED.replace("1.0", "60").replace('print("on")', "terminal._LIMIT = 0")
    program = subprocess.Popen([sys.executable, "-c", lines], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stderr.read(7) == b"the end"
    out, _ = program.communicate(timeout=60)
    assert (program.returncode, out) == (0, b"words" * 1_000_000)


def test_output_to_a_full_disk_does_not_end_the_job():
    with open("/dev/full", "wb") as full:
        program = subprocess.run(
            [sys.executable, "-c", PROGRAM], input=b"\n", stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert program.returncode == 0
    assert program.stderr.count(b"\n") == 1
    assert (
        b"neox-launch: warning: standard output cannot be written: No space left on device; output is "
        b"missing from it, the job continues\n"
    ) in program.stderr


LAUNCH = """
import sys
from neox_launcher.cli import launch
from neox_launcher.controller import terminal
def run(*arguments):
    terminal.pass_on(sys.stdout, b"words")
    sys.exit(143)
launch._run = run
launch.main(["x.yml"])
"""


def test_neox_launch_prints_everything_before_it_exits():
    with open("/dev/full", "wb") as full:
        program = subprocess.run(
            [sys.executable, "-c", LAUNCH], stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert program.returncode == 143
    assert b"standard output cannot be written: No space left on device" in program.stderr


def test_a_deleted_working_directory_does_not_change_the_exit_code(tmp_path):
    (tmp_path / "gone").mkdir()
    lines = LAUNCH.replace("import sys", "import os, sys", 1)
    gone = "terminal._PATIENCE_SECONDS = 0.1\nos.rmdir(os.getcwd())\n"
    lines = lines.replace("launch.main", f"{gone}launch.main")
    program = subprocess.Popen(
        [sys.executable, "-c", lines.replace('b"words"', 'b"words" * 1_000_000')],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path / "gone",
    )
    assert program.wait(timeout=60) == 143
    assert b"Traceback" not in program.stderr.read()


FAILING_FILE = """
import errno, os, sys
from neox_launcher.controller import terminal
from neox_launcher.protocol import background
write = os.write
def fail(descriptor, data):
    if descriptor == 1 and bytes(data).startswith(b"first"):
        raise OSError(errno.EIO, "Input/output error")
    return write(descriptor, data)
background.os.write = fail
terminal.pass_on(sys.stdout, b"first")
terminal.settle_output()
terminal.pass_on(sys.stdout, b"second")
terminal.finish_output()
"""


def test_output_to_a_file_continues_after_an_error(tmp_path):
    with (tmp_path / "log").open("wb") as file:
        program = subprocess.run(
            [sys.executable, "-c", FAILING_FILE], stdout=file, stderr=subprocess.PIPE, timeout=60
        )
    assert program.returncode == 0
    assert b"standard output cannot be written: Input/output error" in program.stderr
    gap = "[neox-launch: 5 bytes of output are missing here: Input/output error]"
    assert (tmp_path / "log").read_text() == f"\n{gap}\nsecond"


def test_both_streams_of_one_file_keep_their_order(tmp_path):
    program = """
import sys
from neox_launcher.controller.terminal import finish_output, pass_on, print_message
for number in range(500):
    pass_on(sys.stdout, b"%d " % number) if number % 2 else print_message(f"{number} ")
finish_output()
"""
    found = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
    )
    assert found.stdout.split() == [b"%d" % number for number in range(500)]
