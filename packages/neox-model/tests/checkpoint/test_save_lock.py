import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from neox_launcher.protocol.claims import folder_in_use, is_locked, lock_of
from neox_model.checkpoint.errors import CheckpointError, FolderInUseError
from neox_model.checkpoint.storage import save_lock
from neox_model.parallel.groups import SINGLE_PROCESS
from support.refusals import refused, shows

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_training_is_refused_until_the_first_process_is_gone(tmp_path):
    folder = tmp_path / "not" / "there"
    with save_lock(folder, SINGLE_PROCESS):
        pass
    command = [sys.executable, "-c", HOLD, str(folder / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with refused(FolderInUseError, "there") as refusal:
            save_lock(folder, SINGLE_PROCESS).__enter__()
        assert refusal.value.is_refused_start
        other.kill()
    with save_lock(folder, SINGLE_PROCESS):
        pass


def test_a_launcher_sees_the_lock_and_does_not_refuse_a_training_by_looking(tmp_path):
    with save_lock(tmp_path, SINGLE_PROCESS):
        assert is_locked(tmp_path)
        assert shows(
            folder_in_use(tmp_path, "saves to"), f"process {os.getpid()}", socket.gethostname(), tmp_path
        )
        with refused(FolderInUseError, f"process {os.getpid()}"):
            save_lock(tmp_path, SINGLE_PROCESS).__enter__()
    with lock_of(tmp_path).open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.05, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        with save_lock(tmp_path, SINGLE_PROCESS):
            assert is_locked(tmp_path)


def test_second_saver_waits_for_the_lock(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        threading.Timer(0.1, other.kill).start()
        with save_lock(tmp_path, SINGLE_PROCESS, patience=60.0):
            assert other.wait() == -signal.SIGKILL


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        refused(CheckpointError, "file", "set save") as refusal,
        save_lock(tmp_path / "file", SINGLE_PROCESS),
    ):
        pytest.fail("claimed a file")
    assert not refusal.value.is_refused_start


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_missing_support_for_locks_is_a_warning(tmp_path, monkeypatch, caplog, number):
    def refuse(file, operation):
        raise OSError(number, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with save_lock(tmp_path, SINGLE_PROCESS):
        assert f"cannot lock {tmp_path} (No locks available)" in caplog.text
