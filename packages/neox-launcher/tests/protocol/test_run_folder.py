"""Private folders are removed with their processes."""

import pytest

from neox_config.errors import LaunchError
from neox_launcher.protocol.run_folder import run_folder
from support.refusals import refused


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def test_a_folder_is_private_and_removed_at_the_end(tmp_path):
    with run_folder() as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_for_temporary_files_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with refused(LaunchError, "missing/neox-", "TMPDIR", code="not-writable"):
        run_folder().__enter__()
