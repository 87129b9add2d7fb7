"""Checks of the files of a dataset by header and size."""

import struct

import pytest

from neox_launcher.plan.dataset_files import check_indexed_files

LENGTHS = [3, 5, 4]


def mmap_index(*, code=8, version=1, lengths=LENGTHS, item_bytes=2, extra=b"", documents=None):
    count = len(lengths)
    offsets = [item_bytes * sum(lengths[:i]) for i in range(count)]
    starts = list(range(count + 1)) if documents is None else documents
    return (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", version, code, count, len(starts))
        + struct.pack(f"<{count}i", *lengths)
        + struct.pack(f"<{count}q", *offsets)
        + struct.pack(f"<{len(starts)}q", *starts)
        + extra
    )


def older_index(*, lengths=LENGTHS, item_bytes=4):
    count = len(lengths)
    ends = [sum(lengths[:i]) for i in range(count + 1)]
    return (
        b"TNTIDX\x00\x00"
        + struct.pack("<QQQQQQ", 1, 4, item_bytes, count, count, count + 1)
        + struct.pack(f"<{count + 1}q", *range(count + 1))
        + struct.pack(f"<{count + 1}q", *ends)
        + struct.pack(f"<{count}q", *lengths)
        + struct.pack(f"<{count + 1}q", *range(count + 1))
    )


def verdict(tmp_path, index, size):
    (tmp_path / "x.idx").write_bytes(index)
    (tmp_path / "x.bin").write_bytes(b"\0" * size)
    return check_indexed_files(str(tmp_path / "x"))


@pytest.mark.parametrize(
    ("index", "size"),
    [
        (mmap_index(), 24),
        (mmap_index(extra=b"\0\0\0"), 24),
        (mmap_index(documents=[0]), 24),
        (mmap_index(code=4, item_bytes=4), 48),
        (mmap_index(code=6, item_bytes=8), 96),
        (older_index(), 48),
    ],
)
def test_whole_files_pass(tmp_path, index, size):
    assert verdict(tmp_path, index, size) is None


@pytest.mark.parametrize(
    ("index", "size", "sentence"),
    [
        (mmap_index(), 23, "x.bin has 23 bytes, but its index describes 24: it is incomplete"),
        (
            mmap_index()[:-1],
            24,
            "has 101 bytes, but its header describes 102: it is damaged or incomplete",
        ),
        (mmap_index()[:20], 24, "ends after 20 bytes, inside its header"),
        (mmap_index(version=2), 24, "has version 2; only version 1 is supported"),
        (mmap_index(code=9), 24, "has the unknown dtype code 9"),
        (mmap_index(lengths=[]), 0, "contains no documents"),
        (mmap_index(lengths=[3, 5, -4]), 24, "contains a negative offset or length"),
        (b"", 24, "is not a dataset index"),
        (b"hello", 24, "is not a dataset index"),
        (older_index(), 47, "has 47 bytes, but its index describes 48"),
        (older_index()[:-8], 48, "it is damaged or incomplete"),
        (older_index()[:30], 48, "inside its header"),
    ],
)
def test_damage_is_reported(tmp_path, index, size, sentence):
    assert sentence in verdict(tmp_path, index, size)


@pytest.mark.parametrize("ending", [".idx", ".bin"])
def test_a_missing_file_is_named(tmp_path, ending):
    verdict(tmp_path, mmap_index(), 24)
    (tmp_path / f"x{ending}").unlink()
    assert check_indexed_files(str(tmp_path / "x")) == f"{tmp_path / 'x'}{ending} does not exist"
