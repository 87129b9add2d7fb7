import errno
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
    merged = merge_indexed(prefixes, tmp_path / "merged")
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
    assert rows(merge_indexed([prefix, prefix], tmp_path / "merged")) == [[1, 2], [3], [1, 2], [3]]


def test_a_merged_file_that_ends_early_leaves_nothing(write_dataset, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "copy_file_range", lambda *_, **__: 0)
    with pytest.raises(EOFError, match="ends 4 bytes early"):
        merge_indexed([write_dataset([[1, 2]])], tmp_path / "out" / "merged")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("second", "output", "sentence"),
    [
        ({"dtype": "int32"}, "merged", "datasets of different token types are not merged"),
        ({}, "b", "b is both read and written; choose another output"),
    ],
)
def test_what_does_not_go_together_is_refused(write_dataset, tmp_path, second, output, sentence) -> None:
    prefixes = [write_dataset([[1]], name="a"), write_dataset([[2]], name="b", **second)]
    with pytest.raises(IndexedDatasetError, match=sentence):
        merge_indexed(prefixes, tmp_path / output)


def test_documents_of_several_sequences_are_refused(write_dataset, tmp_path: Path) -> None:
    prefix = write_dataset([[1], [2], [3]])
    data = bytearray(Path(f"{prefix}.idx").read_bytes())
    data[-24:-16] = (2).to_bytes(8, "little")
    Path(f"{prefix}.idx").write_bytes(data)
    with pytest.raises(IndexedDatasetError, match="documents of several sequences, which would be lost"):
        merge_indexed([prefix], tmp_path / "merged")


def test_sequences_with_gaps_are_refused(write_dataset, tmp_path: Path) -> None:
    prefix = write_dataset([[1], [2], [3]])
    data = bytearray(Path(f"{prefix}.idx").read_bytes())
    place = 34 + 3 * 4 + 2 * 8
    data[place : place + 8] = (0).to_bytes(8, "little")
    Path(f"{prefix}.idx").write_bytes(data)
    with pytest.raises(IndexedDatasetError, match="do not lie one after another"):
        merge_indexed([prefix], tmp_path / "merged")


def test_parts_of_a_split_are_those_of_training(write_dataset, tmp_path: Path) -> None:
    prefix = write_dataset([[i] * (i % 3) for i in range(20)])
    parts = list(split_indexed(prefix, "7/2/1", tmp_path / "p"))
    assert [documents for documents, _ in parts] == [range(14), range(14, 18), range(18, 20)]
    for (documents, dataset), part in zip(parts, ("train", "valid", "test"), strict=True):
        assert dataset.prefix == tmp_path / f"p_{part}"
        assert rows(dataset) == [[i] * (i % 3) for i in documents]
        verify_indexed(dataset.prefix)


def test_an_older_layout_becomes_todays(tmp_path: Path) -> None:
    documents = [[70_000, 2], [3], [4, 5, 6]]
    prefix = write_list_layout(tmp_path / "old", documents)
    new = convert_indexed(prefix, tmp_path / "new")
    assert rows(new) == rows(open_indexed(prefix)) == documents
    assert (read_index(tmp_path / "new").layout, new.dtype) == ("mmap", np.int32)
    with pytest.raises(IndexedDatasetError, match="has the mmap layout already"):
        convert_indexed(tmp_path / "new", tmp_path / "newer")
