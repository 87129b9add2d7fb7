import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from neox_data.preprocess import part_hashes
from neox_data.preprocess.inputs import CorpusPart
from neox_data.preprocess.part_hashes import hashed_parts
from support.refusals import refused

ABC = hashlib.sha256(b"abc").hexdigest()


def test_inputs_are_hashed_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    with hashed_parts([CorpusPart(tmp_path / "a")]) as hashes:
        assert hashes.of_files() == [{"path": f"{tmp_path}/a", "bytes": 3, "sha256": ABC}]


def test_an_error_does_not_wait_for_the_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_hashes, "_BLOCK_BYTES", 1)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    with refused(RuntimeError, "stop"), hashed_parts([CorpusPart(tmp_path / "large")] * 2):
        raise RuntimeError("stop")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hash")]


def test_parts_are_hashed_with_their_files(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(b"abcabc")
    parts = [CorpusPart(tmp_path / "a", 3), CorpusPart(tmp_path / "b", 0, 3), CorpusPart(tmp_path / "b", 3)]
    with hashed_parts(parts) as hashes:
        assert [hashes.of_part(part)["sha256"] for part in parts] == [ABC] * 3
        assert [each["bytes"] for each in hashes.of_files()] == [3, 6]
        assert hashes.of_files()[1]["sha256"] == hashlib.sha256(b"abcabc").hexdigest()


def test_a_part_does_not_wait_for_the_rest_of_its_file(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.write(b"abc")
        file.truncate(1 << 40)
    parts = [CorpusPart(tmp_path / "large", 0, 3), CorpusPart(tmp_path / "large", 3)]
    with ThreadPoolExecutor(1) as waiting, hashed_parts(parts) as hashes:
        assert waiting.submit(hashes.of_part, parts[0]).result(timeout=60)["sha256"] == ABC


def test_a_file_that_cannot_be_read_is_an_error_of_the_one_who_waits(tmp_path: Path) -> None:
    part = CorpusPart(tmp_path / "missing")
    with hashed_parts([part]) as hashes, pytest.raises(FileNotFoundError):
        hashes.of_part(part)
