"""Reasons why a file that a user names cannot be read."""

import os

import pytest

from neox_config.files import why_not_readable
from support.refusals import shows


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file", None),
        ("folder", "is a folder"),
        ("pipe", "is not a regular file"),
        ("gone", "does not exist"),
        ("file/below", "does not exist"),
        ("loop", "cannot be read (Too many levels of symbolic links)"),
        ("n" * 300, "cannot be read (File name too long)"),
    ],
)
def test_the_reason_is_a_text(tmp_path, name, reason):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    assert why_not_readable(tmp_path / name) == reason


def test_a_file_without_read_permission_is_reported(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert shows(why_not_readable(tmp_path / "file"), "read (Permission denied)")
