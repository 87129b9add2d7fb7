import errno
import fcntl
import os
from pathlib import Path

import pytest

from neox_config.errors import NeoXError
from neox_model.generate import results
from neox_model.generate.results import writing_results
from support.refusals import refused


def test_two_generations_do_not_write_to_one_file(tmp_path):
    path = tmp_path / "texts.jsonl"
    with writing_results(path) as write:
        write({"number": 1})
        with refused(NeoXError, "texts.jsonl", code="in-use"):
            writing_results(path).__enter__()
        write({"number": 2})
    assert path.read_text() == '{"number": 1}\n{"number": 2}\n'
    assert [one.name for one in tmp_path.iterdir()] == ["texts.jsonl"]


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_not_a_file_is_refused_before_anything_is_generated(tmp_path, kind):
    path = tmp_path / "texts.jsonl"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with refused(NeoXError, "not a file"):
        writing_results(path).__enter__()
    assert [one.name for one in tmp_path.iterdir()] == ["texts.jsonl"]


def test_errors_of_what_is_done_meanwhile_are_not_those_of_the_file(tmp_path):
    def fail(path: Path) -> None:
        with writing_results(path) as write:
            write({"number": 1})
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with refused(OSError, "Input/output error"):
        fail(tmp_path / "texts.jsonl")
    assert [one.name for one in tmp_path.iterdir()] == ["texts.jsonl.partial"]


def test_a_full_disk_is_an_error_of_the_file(tmp_path):
    (tmp_path / "texts.jsonl.partial").symlink_to("/dev/full")
    with (
        refused(NeoXError, "texts.jsonl", code="not-writable"),
        writing_results(tmp_path / "texts.jsonl") as write,
    ):
        write({"number": 1})


def test_results_are_on_disk_one_by_one_and_replace_earlier_ones_at_the_end(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("earlier\n")
    # Of a generation that was killed before its first result.
    (tmp_path / "texts.jsonl.partial").touch()
    with writing_results(path) as write:
        write({"number": 1})
        assert (tmp_path / "texts.jsonl.partial").read_text() == '{"number": 1}\n'
        assert path.read_text() == "earlier\n"
    assert path.read_text() == '{"number": 1}\n'
    assert [one.name for one in tmp_path.iterdir()] == ["texts.jsonl"]


def test_a_file_is_locked_for_writing_and_is_still_the_partial_one(tmp_path, monkeypatch):
    """NFS locks no file that is open for reading, and one that is not locked yet may be removed."""
    path, lock = tmp_path / "texts.jsonl", results.lock_descriptor
    partial = tmp_path / "texts.jsonl.partial"
    partial.write_text("earlier\n")
    modes = []

    def locked(descriptor: int, **options: bool) -> bool:
        modes.append(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE)
        if len(modes) == 2:
            partial.unlink()
        return lock(descriptor, **options)

    monkeypatch.setattr(results, "lock_descriptor", locked)
    with writing_results(path) as write:
        write({"number": 1})
    assert modes == [os.O_WRONLY] * 3
    assert path.read_text() == '{"number": 1}\n'
    assert (tmp_path / "texts.jsonl.1.partial").read_text() == "earlier\n"
    assert len([*tmp_path.iterdir()]) == 2


def test_a_generation_that_fails_removes_no_file_of_another_one(tmp_path, monkeypatch):
    path, unlink = tmp_path / "texts.jsonl", Path.unlink

    def removed(file: Path, **options: bool) -> None:
        # Until the file is removed, another generation to it is refused.
        with refused(NeoXError, code="in-use"):
            writing_results(path).__enter__()
        unlink(file, **options)

    monkeypatch.setattr(Path, "unlink", removed)
    with pytest.raises(ZeroDivisionError), writing_results(path):
        _ = 1 // 0
    assert [*tmp_path.iterdir()] == []
