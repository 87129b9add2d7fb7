"""Samples of the inverse cloze task: sentences, blocks of whole sentences, and queries taken out of them."""

from pathlib import Path

import numpy as np
import pytest

from neox_data.errors import DataError, TokenizerError
from neox_data.indexed import IndexedDataset, IndexedDatasetWriter, open_indexed
from neox_data.inverse_cloze import Blocks, InverseClozeDataset, SentenceEnds
from neox_data.tokenizers import build_tokenizer
from support.refusals import refused

END = 0
TOKENIZER = build_tokenizer("CharLevelTokenizer")
TEXTS = (
    "One two. Three four! Five? Six seven eight.",
    "A single sentence",
    "x = 1.5\ny = f(x)\n\nreturn y.z\n",
    "First part. " * 12,
)


def written(folder: Path, name: str, texts: tuple[str, ...], *, has_end: bool = True) -> IndexedDataset:
    with IndexedDatasetWriter(folder / name, dtype=np.uint16) as writer:
        for text in texts:
            writer.append(np.array([*TOKENIZER.encode(text), *([END] if has_end else [])], dtype=np.uint16))
    return open_indexed(folder / name)


def blocks(indexed: IndexedDataset, **changes) -> Blocks:
    options = {"titles": None, "documents": range(len(indexed)), "seq_length": 32}
    return Blocks(indexed=indexed, ends=SentenceEnds(TOKENIZER), **options | changes)


def sentences(text: str, longest: int = 100) -> list[str]:
    tokens = np.array(TOKENIZER.encode(text))
    ends = SentenceEnds(TOKENIZER).of(tokens, longest).tolist()
    return [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One two. Three four! Five?", ["One two.", " Three four!", " Five?"]),
        ("Version 1.5 of f.x. It works", ["Version 1.5 of f.x.", " It works"]),
        ("a = 1\n\n  b = 2\n", ["a = 1\n\n", "  b = 2\n"]),
        ("no end", ["no end"]),
        # Space at the beginning is no sentence of its own, and space alone is none.
        ("\n\n  \nOne two. Three", ["\n\n  \nOne two.", " Three"]),
        (" \n\n ", []),
    ],
)
def test_sentences_end_at_final_characters_and_lines(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


def test_sentences_longer_than_a_block_are_divided() -> None:
    assert [len(part) for part in sentences("x" * 25 + ". y.", longest=10)] == [10, 10, 6, 3]


def test_blocks_are_whole_sentences_that_fit(tmp_path: Path) -> None:
    indexed = written(tmp_path, "text", TEXTS)
    found = blocks(indexed)
    texts = [(block.sequence, TOKENIZER.decode(found.tokens(block))) for block in found]
    assert texts[0] == (0, "One two. Three four! Five?")
    # A single sentence is left over, and is not used; so is the document of one.
    assert [sequence for sequence, _ in texts] == [0, 2, 3, 3, 3, 3, 3, 3]
    assert all(len(text) <= 30 for _, text in texts)
    single = blocks(indexed, has_single=True)
    assert "".join(TOKENIZER.decode(single.tokens(block)) for block in single) == "".join(TEXTS)


def items(found: Blocks, **changes) -> InverseClozeDataset:
    options = {"name": "train", "num_samples": 400, "seed": 7, "query_in_block": 0.25}
    return InverseClozeDataset(found, **options | changes)


def text_of(rows: np.ndarray) -> str:
    tokens, is_content = rows
    size = int(is_content.sum())
    assert (is_content[:size] == 1).all()
    assert tokens[0] == tokens[size - 1] == END
    return TOKENIZER.decode(tokens[1 : size - 1].tolist())


def test_a_query_is_a_sentence_of_its_block_and_usually_taken_out(tmp_path: Path) -> None:
    found = blocks(written(tmp_path, "text", TEXTS))
    dataset, stays, queries = items(found), 0, set()
    for item in range(len(dataset)):
        block = found[dataset.block_of(item)]
        whole = TOKENIZER.decode(found.tokens(block))
        query, context = (text_of(rows) for rows in dataset[item])
        assert query in whole
        if context == whole:
            stays += 1
        else:
            places = range(len(context) + 1)
            assert any(context[:place] + query + context[place:] == whole for place in places)
        queries.add((dataset.block_of(item), query))
    count = len(dataset)
    # Five standard deviations.
    assert abs(stays / count - 0.25) < 5 * (0.25 * 0.75 / count) ** 0.5
    assert {(0, part) for part in ("One two.", " Three four!", " Five?")} <= queries


def test_every_pass_reads_every_block_once_and_items_depend_on_their_number_alone(tmp_path: Path) -> None:
    found = blocks(written(tmp_path, "text", TEXTS))
    dataset = items(found)
    size = len(found)
    orders = [[dataset.block_of(item) for item in range(first, first + size)] for first in (0, size)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(size))
    assert orders[0] != orders[1]
    longer = items(found, num_samples=900)
    assert all((dataset[item] == longer[item]).all() for item in (0, 5, 399))
    assert any((dataset[item] != items(found, seed=8)[item]).any() for item in range(9))
    for item in (0, 9):
        ((sequence, first, length),) = dataset.pieces(item)
        assert item in dataset.items_with(sequence)
        block = found[dataset.block_of(item)]
        assert (sequence, first, length) == (block.sequence, block.begin, block.length)


def test_a_block_begins_with_the_title_of_its_document(tmp_path: Path) -> None:
    indexed = written(tmp_path, "text", TEXTS)
    titles = written(tmp_path, "titles", ("numbers", "one", "code", "a title that is too long"))
    found = blocks(indexed, titles=titles, has_single=True)
    dataset = items(found, query_in_block=1.0, num_samples=len(found))
    seen = {}
    for item in range(len(dataset)):
        block = found[dataset.block_of(item)]
        title, _, text = text_of(dataset[item][1]).partition(chr(END))
        assert text == TOKENIZER.decode(found.tokens(block))
        seen[block.sequence] = title
    assert seen == {0: "numbers", 1: "one", 2: "code", 3: "a title "}
    with refused(DataError, "2 titles", "4 documents"):
        blocks(indexed, titles=written(tmp_path, "few", ("a", "b")))


def test_texts_without_blocks_are_refused(tmp_path: Path, monkeypatch) -> None:
    indexed = written(tmp_path, "text", ("One sentence", "Another one"))
    with refused(DataError, "32 tokens", "seq-length"):
        blocks(indexed)
    assert len(blocks(indexed, has_single=True)) == 2
    monkeypatch.setattr(type(TOKENIZER), "token_bytes", lambda self: None)
    with refused(TokenizerError, code="not-bytes"):
        SentenceEnds(TOKENIZER)
