"""Private folders are removed with their processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from neox_config.errors import LaunchError
from neox_launcher.protocol.run_folder import is_known_file, run_folder

MAKER = """
import sys, time
from neox_launcher.protocol.run_folder import run_folder
with run_folder() as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def test_a_folder_is_private_and_removed_at_the_end(tmp_path):
    with run_folder() as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_only_folders_of_killed_processes_are_removed(tmp_path):
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


@pytest.fixture
def abandoned():
    """The folder of a process that was killed, with its files."""
    maker = subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True)
    folder = Path(maker.stdout.readline().strip())
    maker.kill()
    maker.communicate()
    for name in ("token", "agent.pid", "rank-0.pid", ".rank-12.error.json.345.new", "given-up-3"):
        (folder / name).touch()
    os.mkfifo(folder / "rank-0.stdout")
    return folder


def launch():
    with run_folder():
        pass


def test_a_folder_of_a_killed_process_is_removed_with_all_its_files(abandoned):
    launch()
    assert not abandoned.exists()


def test_files_and_folders_that_are_not_ours_stay(abandoned):
    (abandoned / "global_step2").mkdir()
    (abandoned / "global_step2" / "weights").write_text("weights")
    (abandoned / "notes.txt").write_text("notes")
    launch()
    assert (abandoned / "global_step2" / "weights").read_text() == "weights"
    assert {path.name for path in abandoned.iterdir()} == {"global_step2", "notes.txt", "neox-run.lock"}


@pytest.mark.parametrize("content", [None, b"", b"neox-launcher"])
@pytest.mark.parametrize("name", ["lock", "neox-run.lock"])
def test_a_folder_of_the_user_with_a_similar_name_stays(tmp_path, name, content):
    folder = tmp_path / "neox-checkpoints"
    folder.mkdir()
    (folder / "token").touch()
    if content is not None:
        (folder / name).write_bytes(content)
    launch()
    assert (folder / "token").exists()


def test_a_copied_renamed_or_linked_folder_stays(tmp_path, abandoned):
    renamed, linked = tmp_path / "neox-renamed", tmp_path / "neox-linked"
    subprocess.run(["cp", "-a", abandoned, tmp_path / "neox-copied"], check=True)
    abandoned.rename(renamed)
    linked.symlink_to(renamed)
    launch()
    for folder in (renamed, tmp_path / "neox-copied", linked):
        assert (folder / "token").exists()


def test_a_marker_that_is_a_link_or_a_pipe_is_not_read(tmp_path, abandoned):
    marker = abandoned / "neox-run.lock"
    marker.rename(tmp_path / "marker")
    marker.symlink_to(tmp_path / "marker")
    launch()
    marker.unlink()
    os.mkfifo(marker)
    launch()
    assert (abandoned / "token").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "latest", "rank-0.npy/..", "lock", "resolved.yml"])
def test_names_of_other_files_are_not_known(name):
    assert not is_known_file(name)


def test_a_missing_folder_for_temporary_files_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(LaunchError, match=r"missing/neox-\w+ cannot be written: No such file .* set TMPDIR"):
        launch()
