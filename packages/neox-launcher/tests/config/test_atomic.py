"""Files that are complete or absent."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from neox_config.atomic import atomic_write, set_aside, write_new, written_aside
from support.refusals import refused


def test_a_file_appears_when_it_is_complete(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with atomic_write(path) as file:
        file.write("new\r\n")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_bytes() == b"new\r\n"
    assert os.listdir(tmp_path) == ["a.json"]


def write_half(path, failure):
    with atomic_write(path) as file:
        file.write("half")
        raise failure


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_the_older_file_and_nothing_else(tmp_path, failure):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(failure):
        write_half(path, failure)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("writer", [atomic_write, written_aside])
def test_a_device_is_not_replaced(tmp_path, writer):
    os.mkfifo(tmp_path / "pipe")
    with refused(OSError, "a regular file"), writer(tmp_path / "pipe"):
        pass
    assert (tmp_path / "pipe").is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_failure_to_rename_leaves_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError), atomic_write(tmp_path / "folder") as file:
        file.write("text")
    assert os.listdir(tmp_path) == ["folder"]


def test_the_permissions_are_as_asked_from_the_beginning(tmp_path):
    with atomic_write(tmp_path / "secret", mode=0o600) as file:
        assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_a_durable_file_is_flushed_before_it_is_renamed_and_its_folder_after(tmp_path, monkeypatch):
    seen = []

    def fsync(descriptor):
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        seen.append((target, (tmp_path / "a").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with atomic_write(tmp_path / "a", is_durable=True) as file:
        file.write("text")
    aside = tmp_path / f".a.{os.getpid()}.new"
    assert seen == [(aside, False), (tmp_path, True)]


def test_a_file_that_a_function_writes_itself_has_its_name_only_when_it_is_whole(tmp_path):
    path = tmp_path / "trace.json.gz"
    with written_aside(path) as aside:
        aside.write_text("old")
        assert aside.name.endswith("trace.json.gz")
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), written_aside(path) as aside:
        aside.write_text(str(1 / 0))
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json.gz"]
    assert path.read_text() == "old"


def test_files_are_set_aside_under_the_first_number_that_is_free_for_all(tmp_path):
    record, failures = tmp_path / "record.1.csv", tmp_path / "failures.csv"
    for path in (record, failures, tmp_path / "failures.1.csv", tmp_path / "record.1.2.csv"):
        path.write_text(path.name)
    moved = set_aside([record, failures, tmp_path / "absent.csv"])
    assert [path.name for path in moved] == ["record.1.3.csv", "failures.3.csv"]
    assert [path.read_text() for path in moved] == ["record.1.csv", "failures.csv"]
    assert len(list(tmp_path.iterdir())) == 4


def numbered(folder):
    return (folder / f"{number}.json" for number in range(100))


@pytest.mark.parametrize("has_links", [True, False])
def test_a_new_file_gets_the_first_free_name_and_replaces_none(tmp_path, monkeypatch, has_links):
    def no_links(*_):
        raise OSError(errno.EPERM, "there are no hard links here")

    if not has_links:
        monkeypatch.setattr("pathlib.Path.hardlink_to", no_links)
    (tmp_path / "0.json").write_text("old")
    assert [write_new(numbered(tmp_path), text).name for text in ("a\r\n", "b")] == ["1.json", "2.json"]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "0.json": b"old",
        "1.json": b"a\r\n",
        "2.json": b"b",
    }


def test_many_programs_at_once_get_a_name_each(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: write_new(numbered(tmp_path), str(number)), range(40)))
    assert {int(path.read_text()) for path in found} == {*range(40)}
    assert {*tmp_path.iterdir()} == {*found}
    assert len({*found}) == 40


def test_what_a_killed_process_leaves_takes_no_name(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.hardlink_to", killed)
        patch.setattr("pathlib.Path.unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            write_new(numbered(tmp_path), "lost")
    assert write_new(numbered(tmp_path), "kept") == tmp_path / "0.json"
    # Of the same thread, so that it has the temporary name of the killed one.
    assert [*tmp_path.iterdir()] == [tmp_path / "0.json"]
