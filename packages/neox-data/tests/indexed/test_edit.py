import errno
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from neox_data.errors import IndexedDatasetError
from neox_data.indexed import open_indexed
from neox_data.indexed.edit import convert_indexed, merge_indexed, split_indexed
from neox_data.indexed.index import read_index
from neox_data.indexed.layout import LIST_INDEX
from neox_data.indexed.verify import verify_indexed
from support.refusals import refused


def rows(dataset) -> list[list[int]]:
    return [row.tolist() for row in dataset]


def write_list_layout(prefix: Path, documents: list[list[int]]) -> Path:
    sizes = [len(document) for document in documents]
    header = np.zeros(1, LIST_INDEX.header_dtype)
    header["magic"], header["version"] = LIST_INDEX.magic, 1
    header["dtype_code"], header["token_bytes"] = 4, 4
    header["num_sequences"] = header["num_sizes"] = len(sizes)
    header["num_document_starts"] = len(sizes) + 1
    count = np.arange(len(sizes) + 1, dtype="<i8")
    arrays = [count, np.cumsum([0, *sizes], dtype="<i8"), np.array(sizes, "<i8"), count]
    Path(f"{prefix}.idx").write_bytes(header.tobytes() + b"".join(array.tobytes() for array in arrays))
    Path(f"{prefix}.bin").write_bytes(np.concatenate(documents).astype("<i4").tobytes())
    return prefix


def test_merged_datasets_follow_each_other(write_dataset, tmp_path: Path) -> None:
    prefixes = [
        write_dataset([[1, 2], [], [3]], name="a"),
        write_dataset([], name="b"),
        write_dataset([[4]], name="c"),
    ]
    merged, documents, _ = merge_indexed(prefixes, tmp_path / "merged")
    assert documents == range(4)
    assert rows(merged) == [[1, 2], [], [3], [4]]
    assert merged.document_starts.tolist() == [0, 1, 2, 3, 4]
    verify_indexed(tmp_path / "merged")


def test_a_file_system_that_cannot_copy_by_reference_gives_the_same(
    write_dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_, **__):
        raise OSError(errno.EXDEV, "not here")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    prefix = write_dataset([[1, 2], [3]])
    assert rows(merge_indexed([prefix, prefix], tmp_path / "merged").dataset) == [[1, 2], [3], [1, 2], [3]]


def test_a_merged_file_that_ends_early_leaves_nothing(write_dataset, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "copy_file_range", lambda *_, **__: 0)
    with refused(EOFError, "4 bytes early"):
        merge_indexed([write_dataset([[1, 2]])], tmp_path / "out" / "merged")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("second", "output", "sentence"),
    [
        ({"dtype": "int32"}, "merged", "datasets of different"),
        ({}, "b", "choose another output"),
    ],
)
def test_datasets_that_cannot_be_merged_are_refused(
    write_dataset, tmp_path, second, output, sentence
) -> None:
    prefixes = [write_dataset([[1]], name="a"), write_dataset([[2]], name="b", **second)]
    with refused(IndexedDatasetError, sentence):
        merge_indexed(prefixes, tmp_path / output)


def test_documents_of_several_sequences_are_refused(write_dataset, tmp_path: Path) -> None:
    prefix = write_dataset([[1], [2], [3]])
    data = bytearray(Path(f"{prefix}.idx").read_bytes())
    data[-24:-16] = (2).to_bytes(8, "little")
    Path(f"{prefix}.idx").write_bytes(data)
    with refused(IndexedDatasetError, code="several-sequences"):
        merge_indexed([prefix], tmp_path / "merged")


def test_sequences_with_gaps_are_refused(write_dataset, tmp_path: Path) -> None:
    prefix = write_dataset([[1], [2], [3]])
    data = bytearray(Path(f"{prefix}.idx").read_bytes())
    place = 34 + 3 * 4 + 2 * 8
    data[place : place + 8] = (0).to_bytes(8, "little")
    Path(f"{prefix}.idx").write_bytes(data)
    with refused(IndexedDatasetError, code="not-contiguous"):
        merge_indexed([prefix], tmp_path / "merged")


def test_parts_of_a_split_equal_those_of_training(write_dataset, tmp_path: Path) -> None:
    prefix = write_dataset([[i] * (i % 3) for i in range(20)])
    parts = split_indexed(prefix, "7/2/1", tmp_path / "p")
    assert [part.documents for part in parts] == [range(14), range(14, 18), range(18, 20)]
    for (dataset, documents, _), part in zip(parts, ("train", "valid", "test"), strict=True):
        assert dataset.prefix == tmp_path / f"p_{part}"
        assert rows(dataset) == [[i] * (i % 3) for i in documents]
        verify_indexed(dataset.prefix)


def test_copied_tokens_are_compared_with_their_hash(write_dataset, tmp_path: Path) -> None:
    prefix = write_dataset([[1, 2], [3], [4, 5]])
    data = Path(f"{prefix}.bin").read_bytes()
    good, bad = hashlib.sha256(data).hexdigest(), "0" * 64
    merged = merge_indexed([prefix, prefix], tmp_path / "merged", hashes=[good, good])
    assert merged.bin_sha256 == hashlib.sha256(data + data).hexdigest()
    parts = split_indexed(prefix, "2,1", tmp_path / "part", sha256=good)
    assert [part.bin_sha256 for part in parts] == [
        hashlib.sha256(half).hexdigest() for half in (data[:6], data[6:])
    ]
    assert merge_indexed([prefix, prefix], tmp_path / "some", hashes=[good, None]).bin_sha256 is None
    (tmp_path / "out").mkdir()
    for copy in (
        lambda: merge_indexed([prefix, prefix], tmp_path / "out" / "merged", hashes=[good, bad]),
        lambda: split_indexed(prefix, "2,1", tmp_path / "out" / "part", sha256=bad),
    ):
        with refused(IndexedDatasetError, "corpus.bin", code="other-hash"):
            copy()
    assert list((tmp_path / "out").iterdir()) == []


def test_an_older_layout_becomes_todays(tmp_path: Path) -> None:
    documents = [[70_000, 2], [3], [4, 5, 6]]
    prefix = write_list_layout(tmp_path / "old", documents)
    new = convert_indexed(prefix, tmp_path / "new")
    assert rows(new) == rows(open_indexed(prefix)) == documents
    assert (read_index(tmp_path / "new").layout, new.dtype) == ("mmap", np.int32)
    with refused(IndexedDatasetError, code="already-mmap"):
        convert_indexed(tmp_path / "new", tmp_path / "newer")
