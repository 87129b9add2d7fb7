import errno
import fcntl
import json
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from neox_data.errors import DataError
from neox_data.samples import index_cache
from neox_data.samples.build_index import build_sample_index
from neox_data.samples.fingerprint import fingerprint
from neox_data.samples.index_cache import IndexFiles, default_cache_dir, load_or_build
from support.refusals import refused

SIZES = np.array([7, 3, 0, 11, 6], np.int32)
ORDER = {"num_samples": 20, "seq_length": 5, "seed": 7}
STEM = "corpus_train_indexmap_20ns_5sl_7s_packedpi_ac"
NAMES = sorted(f"{STEM}_{part}.npy" for part in ("doc_idx", "sample_idx", "shuffle_idx"))
SUMS = f"{STEM}_sha256.json"


def load(folder: Path, documents=range(5), sizes=SIZES, **changes):
    return load_or_build(
        np.array(documents, np.int32), sizes, prefix=folder / "corpus", name="train", **(ORDER | changes)
    )


def assert_equal(index, documents=range(5), sizes=SIZES) -> None:
    expected = build_sample_index(np.array(documents), sizes, **ORDER)
    for part in ("documents", "starts", "shuffle"):
        np.testing.assert_array_equal(getattr(index, part), getattr(expected, part))


@pytest.fixture
def no_build(monkeypatch: pytest.MonkeyPatch):
    def forbid() -> None:
        def fail(*_, **__):
            raise AssertionError("built again")

        monkeypatch.setattr(index_cache, "build_sample_index", fail)

    return forbid


def test_files_have_the_names_that_others_give_them(tmp_path: Path) -> None:
    assert_equal(load(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted([*NAMES, SUMS])


def test_the_second_time_nothing_is_built(tmp_path: Path, no_build) -> None:
    load(tmp_path)
    no_build()
    assert_equal(load(tmp_path))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the lengths of the arrays of sizes that are hashed from now on."""
    lengths = []

    def count(arrays):
        arrays = list(arrays)
        # The documents are an array of another type.
        lengths.extend(len(array) for array in arrays if array.dtype == np.int16)
        return fingerprint(arrays)

    monkeypatch.setattr(index_cache, "fingerprint", count)
    return lengths


def test_sizes_of_the_recorded_files_are_not_hashed_again(tmp_path: Path, no_build, hashed) -> None:
    sizes = SIZES.astype(np.int16)
    load(tmp_path, sizes=sizes, stamp="a")
    no_build()
    load(tmp_path, sizes=sizes, stamp="a")
    assert hashed == [5]
    # The same content in other files, and again in the first ones.
    for stamp in "bbaa":
        assert_equal(load(tmp_path, sizes=sizes, stamp=stamp))
    assert hashed == [5, 5]
    # Without a state of the files, the sizes are hashed every time.
    for _ in range(2):
        load(tmp_path, sizes=sizes)
    assert hashed == [5, 5, 5, 5]


def test_one_process_hashes_while_the_others_wait(tmp_path: Path, hashed) -> None:
    sizes = SIZES.astype(np.int16)
    load(tmp_path, sizes=sizes, stamp="a")
    results = []
    work = lambda: results.append(load(tmp_path, sizes=sizes, stamp="b"))  # noqa: E731
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert hashed == [5, 5]


def test_the_state_of_the_files_belongs_to_the_documents_of_the_part(tmp_path: Path) -> None:
    sizes = np.full(5, 5, np.int32)
    load(tmp_path, documents=[0, 1, 4], sizes=sizes, stamp="a")
    assert_equal(load(tmp_path, documents=[0, 3, 4], sizes=sizes, stamp="a"), [0, 3, 4], sizes)


MANY = np.random.default_rng(3).integers(1, 60, 3000).astype(np.int32)
EDITS = {
    "one token more": lambda sizes, place: sizes.__setitem__(place, sizes[place] + 1),
    "one token less": lambda sizes, place: sizes.__setitem__(place, sizes[place] - 1),
    "a token moved": lambda sizes, place: sizes.__setitem__(
        slice(place, place + 2), [sizes[place] - 1, sizes[place + 1] + 1]
    ),
    "documents exchanged": lambda sizes, place: sizes.__setitem__(
        slice(place, place + 2), sizes[place : place + 2][::-1].copy()
    ),
}


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("edit", EDITS)
def test_an_index_of_sizes_before_an_edit_is_never_used(tmp_path: Path, edit: str, is_recorded: bool) -> None:
    order = {"num_samples": 5000, "seq_length": 32, "seed": 1}
    stem = "corpus_train_indexmap_5000ns_32sl_1s_packedpi_ac"
    for place in (1, 700, 1500, 2998):
        load(tmp_path, range(3000), MANY, **order)
        if not is_recorded:
            (tmp_path / f"{stem}_sha256.json").unlink()
        edited = MANY.copy()
        EDITS[edit](edited, place)
        assert (edited != MANY).any()
        found = load(tmp_path, range(3000), edited, **order)
        expected = build_sample_index(np.arange(3000), edited, **order)
        for part in ("documents", "starts", "shuffle"):
            np.testing.assert_array_equal(getattr(found, part), getattr(expected, part))


def test_a_missing_file_makes_all_be_built(tmp_path: Path) -> None:
    load(tmp_path)
    (tmp_path / NAMES[1]).unlink()
    assert_equal(load(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted([*NAMES, SUMS])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", ["empty", "cut", "not an array", "pickle", "too short", "other type"])
def test_damaged_file_is_rebuilt_with_a_warning(tmp_path: Path, caplog, name: str, damage: str) -> None:
    load(tmp_path)
    path = tmp_path / name
    data, array = path.read_bytes(), np.load(path)
    if damage == "pickle":
        np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    elif damage in ("too short", "other type"):
        np.save(path, array[:-1] if damage == "too short" else array.astype(np.float32))
    else:
        path.write_bytes({"empty": b"", "cut": data[:-4], "not an array": b"x" * len(data)}[damage])
    with caplog.at_level(logging.WARNING):
        assert_equal(load(tmp_path))
    assert "rebuilding it" in caplog.text
    assert_equal(load(tmp_path))


@pytest.mark.parametrize("name", NAMES)
def test_any_changed_byte_is_found_and_rebuilt(tmp_path: Path, caplog, name: str) -> None:
    load(tmp_path)
    path = tmp_path / name
    data = path.read_bytes()
    for place in range(0, len(data), 13):
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with caplog.at_level(logging.WARNING):
            assert_equal(load(tmp_path))
        assert f"{name} does not match {SUMS}); rebuilding it" in caplog.messages[-1]
        assert path.read_bytes() == data


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"nonsense"])
def test_damaged_checksums_make_the_files_be_rebuilt(tmp_path: Path, caplog, content: bytes) -> None:
    load(tmp_path)
    sums = (tmp_path / SUMS).read_bytes()
    (tmp_path / SUMS).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert_equal(load(tmp_path))
    assert "rebuilding it" in caplog.text
    assert (tmp_path / SUMS).read_bytes() == sums


def test_files_of_another_program_have_no_checksums_and_are_used(
    tmp_path: Path, no_build, monkeypatch
) -> None:
    load(tmp_path)
    sums = (tmp_path / SUMS).read_bytes()
    (tmp_path / SUMS).unlink()
    no_build()
    assert_equal(load(tmp_path))
    # It was checked in full, which is not repeated.
    assert (tmp_path / SUMS).read_bytes() == sums
    monkeypatch.delattr(index_cache, "_find_fault")
    assert_equal(load(tmp_path))


def test_an_index_without_hash_of_the_content_is_checked_in_full(tmp_path: Path, no_build) -> None:
    load(tmp_path)
    record = json.loads((tmp_path / SUMS).read_bytes())
    (tmp_path / SUMS).write_text(json.dumps({name: record[name] for name in NAMES}))
    no_build()
    assert_equal(load(tmp_path))
    assert json.loads((tmp_path / SUMS).read_bytes()) == record


@pytest.mark.parametrize("place", range(1, 20))
def test_every_changed_start_without_checksums_is_found(tmp_path: Path, caplog, place: int) -> None:
    load(tmp_path)
    path = tmp_path / NAMES[1]
    array = np.load(path)
    array[place, 1] ^= 1
    np.save(path, array)
    (tmp_path / SUMS).unlink()
    assert_equal(load(tmp_path))
    assert f"sample_idx begins sample {place} elsewhere" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("name", "message"),
    [("doc_idx", "each document once per epoch"), ("shuffle_idx", "each sample once")],
)
def test_changed_numbers_without_checksums_are_found(tmp_path: Path, caplog, name: str, message: str) -> None:
    load(tmp_path)
    path = tmp_path / f"{STEM}_{name}.npy"
    good = np.load(path)
    for place in range(len(good)):
        (tmp_path / SUMS).unlink()
        array = good.copy()
        array[place] = (array[place] + 1) % 5
        np.save(path, array)
        with caplog.at_level(logging.WARNING):
            assert_equal(load(tmp_path))
        assert message in caplog.messages[-1]


def test_damaged_headers_without_checksums_are_rebuilt(tmp_path: Path) -> None:
    load(tmp_path)
    path = tmp_path / NAMES[1]
    data = path.read_bytes()
    for place in range(0, 128, 3):
        for value in b"\0'(":
            path.write_bytes(data[:place] + bytes([value]) + data[place + 1 :])
            (tmp_path / SUMS).unlink(missing_ok=True)
            assert_equal(load(tmp_path))


def test_files_of_other_data_of_the_same_length_are_found_out(tmp_path: Path, caplog) -> None:
    load(tmp_path)
    others = np.array([6, 4, 0, 11, 6], np.int32)
    assert_equal(load(tmp_path, sizes=others), sizes=others)
    assert "does not match" in caplog.text


def test_files_of_other_documents_are_found_out(tmp_path: Path, caplog) -> None:
    sizes = np.array([5, 5, 5, 5, 5], np.int32)
    load(tmp_path, documents=[0, 2, 4], sizes=sizes)
    assert_equal(load(tmp_path, documents=[1, 2, 3], sizes=sizes), [1, 2, 3], sizes)
    assert "in this part" in caplog.text


@pytest.mark.parametrize(("before", "after"), [(range(4), range(5)), (range(1, 5), range(4))])
def test_files_of_another_split_are_named_so_once(tmp_path: Path, caplog, before, after) -> None:
    load(tmp_path, documents=before)
    assert_equal(load(tmp_path, documents=after), after)
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / STEM}*.npy does not match the data (")
    assert_equal(load(tmp_path, documents=after), after)
    assert len(caplog.messages) == 1


def test_damaged_files_of_another_split_do_not_match_the_data(tmp_path: Path, caplog) -> None:
    load(tmp_path, documents=range(4))
    (tmp_path / SUMS).unlink()
    path = tmp_path / f"{STEM}_shuffle_idx.npy"
    np.save(path, np.load(path)[:-1])
    assert_equal(load(tmp_path))
    (message,) = caplog.messages
    assert "does not match" in message
    assert "split" not in message


def test_one_builds_while_the_others_wait(tmp_path: Path, monkeypatch, caplog) -> None:
    built, release = [], threading.Event()

    def build(*args, **kwargs):
        built.append(threading.get_ident())
        release.wait(300)
        return build_sample_index(*args, **kwargs)

    monkeypatch.setattr(index_cache, "build_sample_index", build)
    results = []
    threads = [threading.Thread(target=lambda: results.append(load(tmp_path))) for _ in range(3)]
    with caplog.at_level(logging.INFO):
        for thread in threads:
            thread.start()
        while caplog.text.count("waiting for another") < 2:
            assert any(thread.is_alive() for thread in threads)
        release.set()
        for thread in threads:
            thread.join()
    assert len(built) == 1
    assert len(results) == 3
    for index in results:
        assert_equal(index)
    assert sorted(os.listdir(tmp_path)) == sorted([*NAMES, SUMS])


def test_leftover_lock_file_does_not_block(tmp_path: Path) -> None:
    (tmp_path / f".{STEM}.lock").write_bytes(b"")
    assert_equal(load(tmp_path))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_index_is_built_without_support_for_locks(tmp_path: Path, monkeypatch, caplog, number: int) -> None:
    def flock(*_):
        raise OSError(number, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert_equal(load(tmp_path))
    assert "has no locks" in caplog.text


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch) -> Path:
    """Return a folder that even root cannot write to."""
    folder = tmp_path / "data"
    folder.mkdir()
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder and allowed(path, mode))
    return folder


def test_cache_folder_is_used_for_read_only_data(read_only: Path, tmp_path: Path, no_build) -> None:
    cache = tmp_path / "cache" / "deep"
    assert_equal(load(read_only, cache_dir=cache))
    assert os.listdir(read_only) == []
    assert len(list(cache.glob(f"*_{STEM}_*.npy"))) == 3
    assert cache.stat().st_mode & 0o777 == 0o700
    no_build()
    assert_equal(load(read_only, cache_dir=cache))


def test_the_check_of_files_next_to_read_only_data_is_recorded_in_the_cache_folder(
    tmp_path: Path, monkeypatch, no_build
) -> None:
    folder, cache = tmp_path / "data", tmp_path / "cache"
    folder.mkdir()
    load(folder)
    (folder / SUMS).unlink()
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder and allowed(path, mode))
    no_build()
    assert_equal(load(folder, cache_dir=cache))
    monkeypatch.delattr(index_cache, "_find_fault")
    assert_equal(load(folder, cache_dir=cache))
    assert sorted(os.listdir(folder)) == NAMES
    assert [path.suffix for path in cache.iterdir()] == [".json"]


def test_a_cache_folder_that_cannot_be_created_is_named(read_only: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with refused(DataError, "file/cache", code="not-created"):
        load(read_only, cache_dir=tmp_path / "file" / "cache")


def test_datasets_of_one_name_do_not_share_cache_files() -> None:
    order = {"name": "train", "num_samples": 1, "seq_length": 1, "seed": 1}
    files = {
        IndexFiles.beside(Path(f"/{place}/corpus"), **order).within(Path("/c")).path("shuffle")
        for place in "ab"
    }
    assert len(files) == 2


def test_the_default_cache_folder_is_the_users(read_only: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert_equal(load(read_only))
    assert default_cache_dir() == tmp_path / "xdg" / "neox-data"
    assert len(list(default_cache_dir().iterdir())) == 4


def test_a_cache_folder_open_to_others_is_refused(read_only: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o755)
    with refused(DataError, "chmod 700", code="open-to-others"):
        load(read_only, cache_dir=cache)
