import errno
import fcntl
import signal
import subprocess
import sys
import threading

import pytest

from neox_model.checkpoint import CheckpointError
from neox_model.checkpoint.claim import claimed
from neox_model.parallel.groups import SINGLE, Groups

GROUPS = Groups(data=SINGLE, model=SINGLE, pipe=SINGLE, world=SINGLE, control=SINGLE)

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_training_is_refused_until_the_first_process_is_gone(tmp_path):
    folder = tmp_path / "not" / "there"
    with claimed(folder, GROUPS):
        pass
    command = [sys.executable, "-c", HOLD, str(folder / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(CheckpointError, match=r"another training saves to .*there; .*another folder"):
            claimed(folder, GROUPS).__enter__()
        other.kill()
    with claimed(folder, GROUPS):
        pass


def test_who_has_patience_waits_for_the_first_to_end(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        threading.Timer(0.1, other.kill).start()
        with claimed(tmp_path, GROUPS, patience=60.0):
            assert other.wait() == -signal.SIGKILL


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CheckpointError, match=r"preparing to save to .*file"),
        claimed(tmp_path / "file", GROUPS),
    ):
        pytest.fail("claimed a file")


def test_without_locks_it_warns_and_goes_on(tmp_path, monkeypatch, caplog):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with claimed(tmp_path, GROUPS):
        assert "cannot be locked (No locks available)" in caplog.text
