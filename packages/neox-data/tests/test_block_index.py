"""Indexes of blocks are made in parts, continued, and refused if they belong to something else."""

import json

import numpy as np
import pytest

from neox_data.block_index import IndexInProgress, begin_index, open_block_index
from neox_data.errors import DataError
from support.refusals import refused

ORIGIN = {"checkpoint": "iteration 4", "datasets": ["ab"], "titles": None, "blocks": 5}
PLACES = np.array([[0, 0, 0, 1, 1], [0, 0, 3, 0, 2], [0, 7, 0, 0, 4], [7, 5, 9, 3, 2]])
EMBEDDINGS = np.arange(15, dtype=np.float32).reshape(5, 3) / 7


def killed(*_, **__):
    raise KeyboardInterrupt


def embed(index):
    for part in index.missing():
        index.write(part, EMBEDDINGS[part.start : part.stop])


@pytest.fixture
def folder(tmp_path):
    begin_index(tmp_path / "index", ORIGIN, part_blocks=2)
    return tmp_path / "index"


@pytest.fixture
def complete(folder):
    index = IndexInProgress(folder, 5)
    embed(index)
    index.complete(PLACES)
    return folder


def test_an_index_is_its_parts_in_order(complete):
    index = open_block_index(complete)
    assert isinstance(index.embeddings, np.memmap)
    assert isinstance(index.places, np.memmap)
    assert len(index) == 5
    np.testing.assert_array_equal(index.embeddings, EMBEDDINGS)
    np.testing.assert_array_equal(index.places, PLACES)
    assert index.made_with == ORIGIN
    assert [path.name for path in complete.parent.iterdir()] == ["index"]
    assert {path.name for path in complete.iterdir()} == {"index.json", "places.npy", "embeddings.npy"}


def test_another_process_computes_what_is_missing(folder):
    index = IndexInProgress(folder, 5)
    index.write(range(2, 4), EMBEDDINGS[2:4])
    assert not folder.exists()
    begin_index(folder, ORIGIN, part_blocks=4)
    again = IndexInProgress(folder, 5)
    # The parts are those of the beginning.
    assert again.missing() == [range(2), range(4, 5)]
    embed(again)
    again.complete(PLACES)
    np.testing.assert_array_equal(open_block_index(folder).embeddings, EMBEDDINGS)


def test_a_part_that_was_not_completely_written_is_missing(folder, monkeypatch):
    monkeypatch.setattr(np, "save", killed)
    index = IndexInProgress(folder, 5)
    with pytest.raises(KeyboardInterrupt):
        index.write(range(2), EMBEDDINGS[:2])
    assert index.missing() == [range(2), range(2, 4), range(4, 5)]


def test_an_index_that_was_killed_while_its_parts_were_joined_is_joined_again(folder, monkeypatch):
    index = IndexInProgress(folder, 5)
    embed(index)
    with monkeypatch.context() as patch:
        patch.setattr("neox_data.block_index.os.rename", killed)
        with pytest.raises(KeyboardInterrupt):
            index.complete(PLACES)
    assert not folder.exists()
    begin_index(folder, ORIGIN, part_blocks=2)
    again = IndexInProgress(folder, 5)
    assert again.missing() == []
    again.complete(PLACES)
    np.testing.assert_array_equal(open_block_index(folder).embeddings, EMBEDDINGS)


def test_an_index_is_complete_before_its_parts_are_deleted(folder, monkeypatch):
    index = IndexInProgress(folder, 5)
    embed(index)
    monkeypatch.setattr("neox_data.block_index.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        index.complete(PLACES)
    assert [path.name for path in folder.parent.iterdir()] == ["index"]
    np.testing.assert_array_equal(open_block_index(folder).embeddings, EMBEDDINGS)


def test_an_index_that_does_not_record_its_texts_is_refused(complete):
    described = json.loads((complete / "index.json").read_text())
    (complete / "index.json").write_text(json.dumps(described | {"format": "neox-block-index-1"}))
    with refused(DataError, "'neox-block-index-1'", code="damaged-description"):
        open_block_index(complete)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"checkpoint": "iteration 8"}, "iteration 4, not iteration 8"),
        ({"datasets": ["ab", "cd"]}, "['ab'], not ['ab', 'cd']"),
        ({"titles": "ef"}, "None, not ef"),
    ],
)
def test_an_index_of_something_else_is_refused(complete, more, words):
    index = open_block_index(complete)
    index.check(dict(ORIGIN))
    with refused(DataError, words, code="other-index"):
        index.check(ORIGIN | more)
    begin_index(complete, ORIGIN, part_blocks=2)
    with refused(DataError, words, code="other-index"):
        begin_index(complete, ORIGIN | more, part_blocks=2)


def test_rows_are_found_by_their_place(complete):
    index = open_block_index(complete)
    for row in range(5):
        assert index.row_of(tuple(int(value) for value in PLACES[:3, row])) == row
    for place in ((0, 0, 6), (0, 1, 0), (2, 0, 0), (1, 0, 4)):
        with refused(DataError, code="no-block"):
            index.row_of(place)


def test_missing_and_damaged_indexes_are_named(tmp_path, complete):
    with refused(DataError, code="no-index"):
        open_block_index(tmp_path / "nothing")
    with refused(DataError, "index.partial", code="not-on-this-host"):
        IndexInProgress(complete, 5)
    embeddings = (complete / "embeddings.npy").read_bytes()
    (complete / "embeddings.npy").write_bytes(embeddings[:-4])
    with refused(DataError, code="damaged-index"):
        open_block_index(complete)
    np.save(complete / "embeddings.npy", EMBEDDINGS[:4])
    with refused(DataError, "(4, 5)", "(4, 3)"):
        open_block_index(complete)
    for wrong in ({}, {"made_with": []}, {"made_with": {}, "part_blocks": 0}):
        (complete / "index.json").write_text(json.dumps({"format": "neox-block-index-2", **wrong}))
        with refused(DataError, "index.json", code="damaged-description"):
            open_block_index(complete)
    (complete / "index.json").write_text(json.dumps({"format": "another"}))
    with refused(DataError, "index.json", "'another'", code="damaged-description"):
        open_block_index(complete)


def test_parts_of_another_size_are_named(folder):
    index = IndexInProgress(folder, 5)
    with refused(DataError, "000000000000.npy", code="missing-part"):
        index.complete(PLACES)
    embed(index)
    index.write(range(2, 4), EMBEDDINGS[:1])
    with refused(DataError, "000000000002.npy", "(1, 3)", "2 blocks"):
        index.complete(PLACES)
    assert not folder.exists()
