"""Private folders go with their makers."""

import signal
import subprocess
import sys

import pytest

from neox_launcher.run_folder import run_folder

MAKER = """
import sys, time
from neox_launcher.run_folder import run_folder
with run_folder() as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def test_it_is_private_and_removed_at_the_end(tmp_path):
    with run_folder() as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_maker_leaves_is_removed_by_the_next_and_nothing_else(tmp_path):
    (tmp_path / "neox-notes").mkdir()
    (tmp_path / "neox-file").touch()
    maker = subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True)
    abandoned = maker.stdout.readline().strip()
    with run_folder() as first:
        assert {str(path) for path in tmp_path.iterdir()} >= {abandoned, str(first)}
        maker.send_signal(signal.SIGKILL)
        maker.communicate()
        with run_folder():
            names = {path.name for path in tmp_path.iterdir()}
            assert len(names) == 4
            assert {"neox-notes", "neox-file", first.name} < names
