import os
from pathlib import Path

import pytest

from neox_data.errors import DataError
from neox_data.whole_files import exclusive_lock, written_aside
from support.refusals import refused


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with written_aside(path) as file:
        file.write(b"all of it")
        assert not path.exists()
    assert path.read_bytes() == b"all of it"
    assert os.listdir(tmp_path) == ["a.json"]


def write_and_stop(path: Path) -> None:
    with written_aside(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt


def test_a_failure_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        write_and_stop(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_temporary_file_of_a_killed_process_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / ".a.json.part").write_bytes(b"longer than what follows")
    with written_aside(tmp_path / "a.json") as file:
        file.write(b"short")
    assert (tmp_path / "a.json").read_bytes() == b"short"


def test_two_writers_of_one_file_are_refused(tmp_path: Path) -> None:
    with written_aside(tmp_path / "a") as file:
        file.write(b"first")
        with (
            refused(DataError, code="in-use"),
            written_aside(tmp_path / "a"),
        ):
            pass
    assert (tmp_path / "a").read_bytes() == b"first"


def test_a_lock_can_be_taken_again_and_leaves_no_file(tmp_path: Path) -> None:
    for _ in range(2):
        with exclusive_lock(tmp_path / "lock", purpose="a test"):
            assert (tmp_path / "lock").exists()
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with refused(FileNotFoundError, "/nowhere/a'"), written_aside(tmp_path / "nowhere" / "a"):
        pass


def test_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with refused(IsADirectoryError, "/folder'"), written_aside(tmp_path / "folder"):
        pass
    assert os.listdir(tmp_path) == ["folder"]
    with refused(DataError, code="is-a-folder"), written_aside(Path("")):
        pass
