"""A damaged .idx: each fault has its sentence, and none makes the reader crash or allocate."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neox_data.errors import IndexedDatasetError
from neox_data.indexed import open_indexed
from support.refusals import refused

Change = Callable[[bytearray], None]

# Places in the .idx of three sequences: the header has 34 bytes, then 12 of sizes, 24 of offsets, 32 of
# document starts.
VERSION, CODE, COUNT, STARTS, SIZES, OFFSETS, DOCUMENTS = 9, 17, 18, 26, 34, 46, 70


def put(place: int, form: str, value: int) -> Change:
    def change(data: bytearray) -> None:
        struct.pack_into(form, data, place, value)

    return change


def cut(length: int) -> Change:
    def change(data: bytearray) -> None:
        del data[length:]

    return change


@pytest.fixture
def prefix(write_dataset) -> Path:
    return write_dataset([[1, 2], [3], [4, 5, 6]])


FAULTS = {
    "empty": (cut(0), ["is empty"]),
    "other file": (put(0, "8s", b"\x93NUMPY\1\0"), [r"b'\x93NUMPY"]),
    "in the header": (cut(20), ["20 bytes", "34"]),
    "version": (put(VERSION, "<Q", 2), ["version 2", "version 1"]),
    "dtype": (put(CODE, "B", 9), ["code 9", "1 (uint8)"]),
    "disputed dtype": (put(CODE, "B", 6), ["code 6", "float32"]),
    "truncated": (cut(101), ["101 bytes", "3 sequences", "102"]),
    "absurd count": (put(COUNT, "<Q", 2**63), ["102 bytes", "9,223,372,036,854,775,808"]),
    "absurd documents": (put(STARTS, "<Q", 2**64 - 1), ["102 bytes", "3 sequences"]),
    "too few": (put(COUNT, "<Q", 2), ["102 bytes", "2 sequences", "90"]),
    "negative": (put(SIZES + 4, "<i", -1), ["-1 tokens", "sequence 1"]),
    "wrong length": (put(SIZES, "<i", 3), ["corpus.bin", "12 bytes", "corpus.idx", "7 tokens", "14"]),
    "documents": (put(DOCUMENTS + 24, "<q", 9), ["0 to 9", "0 to 3"]),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_with_its_values(prefix: Path, fault: str) -> None:
    change, values = FAULTS[fault]
    path = Path(f"{prefix}.idx")
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    with refused(IndexedDatasetError, path.parent, *values) as caught:
        open_indexed(prefix)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("offset", [-2, 1, 8, 2**62])
def test_an_offset_outside_of_the_bin_is_found_when_it_is_read(prefix: Path, offset: int) -> None:
    path = Path(f"{prefix}.idx")
    data = bytearray(path.read_bytes())
    struct.pack_into("<q", data, OFFSETS + 16, offset)
    path.write_bytes(data)
    dataset = open_indexed(prefix)
    assert dataset[0].tolist() == [1, 2]
    with refused(IndexedDatasetError, "sequence 2", f"byte {offset:,}"):
        dataset[2]


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_the_state_of_the_files_changes_with_either(prefix: Path, monkeypatch, suffix: str) -> None:
    assert open_indexed(prefix).index.stamp == ""
    monkeypatch.setattr("neox_data.indexed.index._COARSEST_CLOCK_SECONDS", 0)
    before, path = open_indexed(prefix).index.stamp, Path(f"{prefix}{suffix}")
    assert open_indexed(prefix).index.stamp == before != ""
    written = path.stat()
    # The same bytes, size and time of writing.
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    assert open_indexed(prefix).index.stamp != before


def test_a_truncated_bin_is_found(prefix: Path) -> None:
    Path(f"{prefix}.bin").write_bytes(b"\1\0\2\0")
    with refused(IndexedDatasetError, "corpus.bin", "4 bytes", "corpus.idx"):
        open_indexed(prefix)


@pytest.mark.parametrize("missing", [".bin", ".idx"])
def test_a_missing_file_is_named(prefix: Path, missing: str) -> None:
    Path(f"{prefix}{missing}").unlink()
    with refused(IndexedDatasetError, f"corpus{missing}", code="missing-file"):
        open_indexed(prefix)


def test_a_prefix_with_an_ending_is_not_said_to_have_none(prefix: Path) -> None:
    with refused(IndexedDatasetError, ".bin'", code="missing-file"):
        open_indexed(f"{prefix}.bin")


def test_the_disputed_codes_are_decided_by_the_size_of_the_bin(prefix: Path) -> None:
    path = Path(f"{prefix}.idx")
    data = bytearray(path.read_bytes())
    for code in (6, 7):
        data[CODE] = code
        path.write_bytes(data)
        for dtype in (np.float32, np.float64):
            np.arange(6, dtype=dtype).tofile(f"{prefix}.bin")
            # The offsets are those of uint16, so only the first sequence is where they say.
            assert open_indexed(prefix).dtype == dtype


def test_the_document_index_of_merged_files_may_be_0_alone(prefix: Path) -> None:
    path = Path(f"{prefix}.idx")
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, STARTS, 1)
    path.write_bytes(data[: DOCUMENTS + 8])
    dataset = open_indexed(prefix)
    assert dataset.document_starts.tolist() == [0]
    assert [row.tolist() for row in dataset] == [[1, 2], [3], [4, 5, 6]]


def test_the_mode_bytes_of_multimodal_files_are_let_pass(prefix: Path) -> None:
    with Path(f"{prefix}.idx").open("ab") as file:
        file.write(b"\0\1\0")
    assert open_indexed(prefix)[2].tolist() == [4, 5, 6]


@settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
@given(
    changes=st.lists(st.tuples(st.integers(0, 101), st.integers(0, 255)), min_size=1, max_size=12),
    length=st.integers(0, 102),
)
def test_arbitrary_bytes_give_the_data_or_a_sentence(prefix: Path, changes, length: int) -> None:
    path = Path(f"{prefix}.idx")
    original = path.read_bytes()
    data = bytearray(original)
    for place, value in changes:
        data[place] = value
    path.write_bytes(data[: length or None])
    message, rows = None, []
    try:
        rows = list(open_indexed(prefix))
    except IndexedDatasetError as error:
        message = str(error)
    path.write_bytes(original)
    assert message is None or str(prefix) in message
    assert all(row.size <= 6 for row in rows)


def write_list_index(prefix: Path, documents: list[list[int]], **header: int) -> None:
    """Return an index in the older layout, packed by hand."""
    sizes = [len(document) for document in documents]
    count = len(sizes)
    offsets = [0, *np.cumsum(sizes).tolist()]
    counts = {"code": 4, "bytes": 4, "items": count, "sizes": count, "starts": count + 1} | header
    numbers = [1, *counts.values(), *range(count + 1), *offsets, *sizes, *range(count + 1)]
    Path(f"{prefix}.idx").write_bytes(b"TNTIDX\0\0" + struct.pack(f"<{len(numbers)}q", *numbers))
    np.array([token for document in documents for token in document], dtype="<i4").tofile(f"{prefix}.bin")


@pytest.mark.parametrize("implementation", ["infer", "mmap", "lazy", "cached"])
def test_the_older_layout_is_read(tmp_path: Path, implementation: str) -> None:
    documents = [[70_000, 2], [], [3, 4, 5]]
    write_list_index(tmp_path / "old", documents)
    dataset = open_indexed(tmp_path / "old", implementation)
    assert [row.tolist() for row in dataset] == documents
    assert dataset.sizes.dtype == np.int32
    assert dataset.document_starts.tolist() == [0, 1, 2, 3]
    assert dataset.get(2, 1, 2).tolist() == [4, 5]


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ({"bytes": 8}, "8 bytes per"),
        ({"sizes": 2}, "2 sizes for"),
        ({"items": 1, "sizes": 1}, "longer than its"),
        ({"starts": 2**40}, "is truncated"),
    ],
)
def test_a_damaged_older_layout_has_its_sentence(
    tmp_path: Path, header: dict[str, int], sentence: str
) -> None:
    write_list_index(tmp_path / "old", [[1, 2], [], [3]], **header)
    with refused(IndexedDatasetError, sentence):
        open_indexed(tmp_path / "old")
