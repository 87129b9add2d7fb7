"""Readers and terminals that have gone end no job."""

import os
import subprocess
import sys

from neox_launcher.terminal import pass_on, tell

PROGRAM = """
import sys
from neox_launcher.terminal import pass_on
sys.stdin.readline()
for _ in range(3):
    pass_on(sys.stdout, b"words" * 1000)
sys.stderr.write("on")
"""


def test_words_arrive_in_the_order_of_what_was_said(capfdbinary):
    sys.stdout.write("first ")
    pass_on(sys.stdout, b"second \xff")
    tell("aside")
    assert capfdbinary.readouterr() == (b"first second \xff", b"aside")


def test_without_a_stream_nothing_is_said():
    pass_on(None, b"words")


def test_work_goes_on_when_the_reader_has_gone():
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
