"""Ctrl-C while a command is imported."""

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROGRAMS = {
    name: entry.split(":")
    for path in sorted(Path(__file__).parents[2].glob("packages/*/pyproject.toml"))
    for name, entry in tomllib.loads(path.read_text())["project"]["scripts"].items()
}
# Interrupts the import of a module as the terminal does: there, or where Python ignores an exception.
INTERRUPTED = """
import signal, sys, weakref

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            if {is_callback}:
                class Lock: pass
                lock = Lock()
                ends = weakref.ref(lock, lambda reference: signal.raise_signal(signal.SIGINT))
                del lock
            else:
                signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""
STARTED = """
import signal
before = signal.getsignal(signal.SIGINT)
from {module} import {function}
assert signal.getsignal(signal.SIGINT) is before
{function}(["--help"])
"""


def run(name, program, **options):
    module, function = PROGRAMS[name]
    program += STARTED.format(module=module, function=function)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, **options)


@pytest.mark.parametrize("is_callback", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_ctrl_c_during_the_imports_of_a_command_ends_it_without_a_traceback(name, is_callback):
    done = run(name, INTERRUPTED.format(is_callback=is_callback))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_command_that_a_shell_started_in_the_background_ignores_ctrl_c(name):
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = run(name, INTERRUPTED.format(is_callback=False))
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert (done.returncode, done.stderr) == (0, "")
