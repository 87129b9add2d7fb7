"""Labels next to tokens, in windows and in samples of whole documents."""

import os
from pathlib import Path

import numpy as np
import pytest

from neox_data.blend import build_blend
from neox_data.blend_report import report_datasets
from neox_data.curriculum.analyze import vocabulary_rarity
from neox_data.errors import DataError
from neox_data.gpt_dataset import GPTDataset
from neox_data.indexed import open_indexed
from neox_data.labels import LabelledDataset, check_labels
from neox_data.lazy_dataset import LazyGPTDataset
from neox_data.samples.whole_documents import IGNORED
from neox_data.trace import passages
from neox_data.whole_dataset import WholeDocumentDataset
from support.refusals import refused, shows

DOCUMENTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16, 17]]
# The first half of each document does not count; nothing of document 2 does.
MASKED = [2, 3, 1, 4]
SEQ_LENGTH = 5


@pytest.fixture
def tokens(write_dataset) -> Path:
    return write_dataset(DOCUMENTS)


@pytest.fixture
def labels(write_dataset) -> Path:
    rows = [[IGNORED] * count + row[count:] for row, count in zip(DOCUMENTS, MASKED, strict=True)]
    return write_dataset(rows, dtype="int32", name="labels")


def whole(tokens: Path, labels: Path | None, **changes) -> WholeDocumentDataset:
    settings = {"documents": np.arange(4), "num_samples": 5, "seq_length": SEQ_LENGTH, "seed": 2}
    settings |= {"pack_impl": "best_fit", "allow_chopped": True, "name": "train", "prefix": tokens} | changes
    given = None if labels is None else open_indexed(labels)
    return WholeDocumentDataset(open_indexed(tokens), labels=given, **settings)


@pytest.mark.parametrize("pack_impl", ["best_fit", "unpacked", "pack_until_overflow"])
def test_an_item_has_whole_documents_with_their_labels_and_padding(tokens, labels, pack_impl) -> None:
    dataset = whole(tokens, labels, pack_impl=pack_impl)
    room = SEQ_LENGTH + 1
    for item in range(len(dataset)):
        numbers = [sequence for sequence, _, _ in dataset.pieces(item)]
        row = [token for number in numbers for token in DOCUMENTS[number][:room]]
        label = [
            IGNORED if place < MASKED[number] else token
            for number in numbers
            for place, token in enumerate(DOCUMENTS[number][:room])
        ]
        assert 2 not in numbers
        padding = room - len(row)
        assert padding >= 0
        expected = [row + [0] * padding, label + [IGNORED] * padding]
        assert dataset[item].tolist() == expected
        assert dataset[item].dtype == np.int64


@pytest.mark.parametrize("pack_impl", ["best_fit", "unpacked", "pack_until_overflow"])
def test_a_document_whose_first_label_alone_counts_is_left_out(write_dataset, tokens, pack_impl) -> None:
    rows = [
        [row[0]] + [IGNORED] * (len(row) - 1) if place == 1 else row for place, row in enumerate(DOCUMENTS)
    ]
    dataset = whole(tokens, write_dataset(rows, dtype="int32", name="labels"), pack_impl=pack_impl)
    found = {sequence for item in range(len(dataset)) for sequence, _, _ in dataset.pieces(item)}
    assert found <= {0, 3}
    assert 0 in found


@pytest.mark.parametrize("pack_impl", ["best_fit", "unpacked", "pack_until_overflow"])
def test_passes_are_counted_over_the_documents_that_are_used(tokens, labels, pack_impl) -> None:
    dataset = whole(tokens, labels, pack_impl=pack_impl, num_samples=10)
    read = [len(list(dataset.pieces(item))) for item in range(len(dataset))]
    # Of four documents, one has no label that counts.
    assert [dataset.passes(count) for count in (1, 4)] == [sum(read[:count]) / 3 for count in (1, 4)]
    assert dataset.epochs == -(-sum(read) // 3) == 4
    (source,) = report_datasets(dataset, 4)
    assert (source.epochs, source.built_epochs) == (dataset.passes(4), dataset.epochs)


def test_padding_has_no_rarity(tokens) -> None:
    dataset = whole(tokens, None, pack_impl="unpacked", num_samples=4)
    order = [next(iter(dataset.pieces(item)))[0] for item in range(4)]
    # Every token of these documents occurs once; 15 of them are inputs.
    inputs = [DOCUMENTS[number][:SEQ_LENGTH] for number in order]
    expected = round(float(np.log2(sum(map(len, inputs)))) * 1000)
    assert vocabulary_rarity(dataset, 4).tolist() == [expected] * 4


def test_padding_does_not_count_without_labels(tokens) -> None:
    dataset = whole(tokens, None, pack_impl="unpacked")
    rows = [dataset[item] for item in range(len(dataset))]
    short = next(row for row in rows if row[0, 0] == 1)
    assert short.tolist() == [[1, 2, 3, 0, 0, 0], [1, 2, 3, IGNORED, IGNORED, IGNORED]]


def test_the_trace_finds_whole_documents(tokens, labels) -> None:
    dataset = whole(tokens, labels)
    for document in range(4):
        found = [
            item
            for item in range(len(dataset))
            if any(passage.document == document for passage in passages(dataset, item))
        ]
        assert dataset.items_with(document).tolist() == found
    assert [list(dataset.items_with(2)), dataset.num_documents, dataset.num_tokens] == [[], 4, 17]


def test_an_item_outside_is_refused(tokens, labels) -> None:
    dataset = whole(tokens, labels)
    with refused(IndexError, f"item {len(dataset)}", "'train'"):
        dataset[len(dataset)]


def test_samples_are_blended_with_their_labels(tokens, labels) -> None:
    def build(number: int, share: int) -> WholeDocumentDataset:
        return whole(tokens, labels, name=f"train_{number}", num_samples=share, seed=number)

    blend = build_blend(build, [1.0, 3.0], 20)
    assert blend[0].shape == (2, SEQ_LENGTH + 1)
    for item in range(20):
        number, place = blend.locate(item)
        assert (blend[item] == blend.datasets[number][place]).all()


def test_the_stored_index_is_used_again(tokens, labels, caplog) -> None:
    caplog.set_level("INFO")
    first = whole(tokens, labels)
    assert shows(caplog.text, "3", "4 documents", "2 tokens")
    caplog.clear()
    second = whole(tokens, labels)
    assert not caplog.text
    assert all((first[item] == second[item]).all() for item in range(len(first)))


def test_an_index_for_other_labels_is_built_again(tokens, labels, write_dataset, caplog) -> None:
    caplog.set_level("WARNING")
    assert 3 in whole(tokens, labels).index.documents
    written = os.stat(f"{labels}.bin")
    rows = [[IGNORED] * len(row) if number == 3 else row for number, row in enumerate(DOCUMENTS)]
    write_dataset(rows, dtype="int32", name="labels")
    os.utime(f"{labels}.bin", ns=(written.st_atime_ns, written.st_mtime_ns))
    assert 3 not in whole(tokens, labels).index.documents
    assert "split, other documents" in caplog.text


def test_labels_that_are_only_written_again_build_nothing(tokens, labels, write_dataset, caplog) -> None:
    first = whole(tokens, labels)
    caplog.set_level("INFO")
    rows = [open_indexed(labels)[number].tolist() for number in range(4)]
    write_dataset(rows, dtype="int32", name="labels")
    second = whole(tokens, labels)
    assert not caplog.text
    assert all((first[item] == second[item]).all() for item in range(len(first)))


def test_an_index_of_another_program_is_built_again(tokens, labels, caplog) -> None:
    # Copied: the array is a map of the file that is overwritten.
    expected = whole(tokens, labels).index.documents.tolist()
    (sums,) = tokens.parent.glob("*_best_fitpi_ac_sha256.json")
    sums.unlink()
    (documents,) = tokens.parent.glob("*_best_fitpi_ac_doc_idx.npy")
    np.save(documents, np.zeros(len(expected), np.int32))
    assert whole(tokens, labels).index.documents.tolist() == expected
    assert "does not record" in caplog.text


@pytest.mark.parametrize("pack_impl", ["packed", "best_fit", "unpacked", "pack_until_overflow"])
@pytest.mark.parametrize("age", [0, 2])
def test_after_an_edit_of_documents_every_index_is_that_of_the_new_ones(
    tmp_path, write_dataset, monkeypatch, pack_impl: str, age: int
) -> None:
    monkeypatch.setattr("neox_data.indexed.index._COARSEST_CLOCK_SECONDS", age)

    def samples(name: str, rows: list[list[int]]) -> list[list]:
        prefix = write_dataset(rows, name=name)
        settings = {"documents": np.arange(len(rows)), "num_samples": 30, "seq_length": 8, "seed": 1}
        settings |= {"name": "train", "prefix": prefix}
        if pack_impl == "packed":
            dataset = GPTDataset(open_indexed(prefix), **settings)
        else:
            dataset = whole(prefix, None, pack_impl=pack_impl, **settings)
        return [dataset[item].tolist() for item in range(len(dataset))]

    sizes = np.random.default_rng(2).integers(1, 12, 40).tolist()
    for edit in range(8):
        rows = [[10 * number + 1] * size for number, size in enumerate(sizes)]
        assert samples("edited", rows) == samples(f"new_{edit}", rows)
        first, second = 5 * edit, 5 * edit + 3
        if edit % 2:
            sizes[first], sizes[second] = sizes[second] + 1, sizes[first]
        else:
            sizes[first], sizes[second] = sizes[first] + 1, max(sizes[second] - 1, 1)


def test_the_log_has_no_reasons_where_nothing_is_left_out(tokens, caplog) -> None:
    caplog.set_level("INFO")
    whole(tokens, None, seq_length=8)
    assert shows(caplog.text, "4", "4 documents", "0 tokens")


@pytest.mark.parametrize(("pack_impl", "room"), [("best_fit", 6), ("unpacked", 5)])
def test_the_log_says_how_many_labels_were_looked_at(tokens, write_dataset, caplog, pack_impl, room) -> None:
    caplog.set_level("INFO")
    rows = [*DOCUMENTS[:3], [IGNORED] * 7 + [1]]
    whole(tokens, write_dataset(rows, dtype="int32", name="labels"), pack_impl=pack_impl)
    assert shows(caplog.text, "1", f"{room} tokens")


@pytest.mark.parametrize("kind", ["gpt_neox", "lazy"])
def test_windows_of_the_stream_have_their_labels(tokens, labels, kind: str) -> None:
    settings = {"name": "train", "num_samples": 6, "seq_length": SEQ_LENGTH, "seed": 5}

    def build(indexed) -> GPTDataset | LazyGPTDataset:
        if kind == "lazy":
            return LazyGPTDataset(indexed, documents=range(4), **settings)
        return GPTDataset(indexed, documents=np.arange(4), prefix=tokens, **settings)

    dataset = LabelledDataset(build, open_indexed(tokens), open_indexed(labels))
    plain = build(open_indexed(tokens))
    hidden = {row[place] for row, count in zip(DOCUMENTS, MASKED, strict=True) for place in range(count)}
    assert len(dataset) == len(plain) >= 6
    for item in range(len(dataset)):
        row, label = dataset[item].tolist()
        assert row == plain[item].tolist()
        assert label == [IGNORED if token in hidden else token for token in row]
        assert list(dataset.pieces(item)) == list(plain.pieces(item))
    assert dataset.items_with(1).tolist() == plain.items_with(1).tolist()


FAULTS = {
    "fewer documents": ([[1, 2, 3]], "int32", ["1 document", "3 labels"]),
    "another length": ([[1, 2, 3], [4, 5, 6], [9], [0] * 8], "int32",
        ["4 documents", "15 labels", "--loss-mask"]),
    "another document": ([[1, 2, 3], [4, 5, 6, 7, 8, 9], [], [0] * 8], "int32",
        ["4 documents, 17 tokens", "document 1", "6 labels, 5 tokens"]),
    "no negative numbers": (DOCUMENTS, "uint16", ["uint16"]),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_labels_of_other_tokens_are_refused(tokens, write_dataset, fault) -> None:
    rows, dtype, values = FAULTS[fault]
    wrong = open_indexed(write_dataset(rows, dtype=dtype, name="wrong"))
    with refused(DataError, *values):
        check_labels(open_indexed(tokens), wrong)
    with refused(DataError, *values):
        whole(tokens, wrong.prefix)
    assert not list(tokens.parent.glob("*indexmap*"))
