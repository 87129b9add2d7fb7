import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neox_data import amount_progress, search
from neox_data.amount_progress import report_search, tracked
from neox_data.indexed import IndexedDataset, IndexedDatasetWriter, open_indexed
from neox_data.search import TokenMatcher, documents_with, token_matcher
from neox_data.tokenizers import Tokenizer, build_tokenizer

TEXTS = [
    "one fish two fish\n", "", "red fish  blue fish", "x", "na\u00efve caf\u00e9 \u4f60\u597d \U0001f680",
    "aaaaab", "the end", "of the quick brown fox<|endoftext|> and more",
]  # fmt: skip


@pytest.fixture(params=["CharLevelTokenizer", "HFTokenizer"])
def tokenizer(request: pytest.FixtureRequest, tokenizer_json: Path) -> Tokenizer:
    file = tokenizer_json if request.param == "HFTokenizer" else None
    return build_tokenizer(request.param, vocab_file=file)


def dataset_of(texts: list[str], tokenizer: Tokenizer, prefix: Path) -> IndexedDataset:
    with IndexedDatasetWriter(prefix, dtype=np.uint16) as writer:
        for text in texts:
            writer.append(tokenizer.encode(text))
    return open_indexed(prefix)


def holding(dataset: IndexedDataset, text: str, tokenizer: Tokenizer) -> list[int]:
    return [number for number, row in enumerate(dataset) if text in tokenizer.decode(row.tolist())]


# Beginnings and ends within words, one letter, across spaces and lines, over the end of a document, nowhere.
@pytest.mark.parametrize(
    "text",
    ["fish", "ish two f", "e", "\n", "fish  b", "\u00e9 \u4f60", "\U0001f680", "aaab", "x\u00ef", "endof",
     "xna", "endof the", "nowhere", "\ufffd", "red\ufffd"],
)  # fmt: skip
@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_search_finds_the_documents_that_contain_the_text(
    tmp_path: Path, tokenizer: Tokenizer, text: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_BLOCK_TOKENS", block)
    dataset = dataset_of(TEXTS, tokenizer, tmp_path / "a")
    looked_at = []
    found = list(documents_with(dataset, text, tokenizer, report=looked_at.append))
    assert found == holding(dataset, text, tokenizer)
    assert sum(looked_at) == dataset.num_tokens


@pytest.mark.slow
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rows=st.lists(st.lists(st.integers(0, 299), max_size=12), min_size=1, max_size=8), data=st.data())
def test_any_tokens_are_searched_as_their_decoded_texts_are(
    tmp_path: Path, tokenizer_json: Path, rows: list[list[int]], data: st.DataObject
) -> None:
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=tokenizer_json)
    with IndexedDatasetWriter(tmp_path / "a", dtype=np.uint16) as writer:
        for row in rows:
            writer.append(row)
    dataset = open_indexed(tmp_path / "a")
    texts = [tokenizer.decode(row) for row in rows]
    whole = data.draw(st.sampled_from(texts))
    first = data.draw(st.integers(0, len(whole)))
    text = whole[first : data.draw(st.integers(first, len(whole)))] or "e"
    assert list(documents_with(dataset, text, tokenizer)) == holding(dataset, text, tokenizer)


@settings(max_examples=300, deadline=None)
@given(
    entries=st.lists(st.binary(max_size=4), min_size=1, max_size=6),
    numbers=st.lists(st.integers(0, 7), max_size=30),
    passage=st.binary(min_size=1, max_size=6),
)
def test_passages_are_found_by_the_bytes_of_the_tokens(
    entries: list[bytes], numbers: list[int], passage: bytes
) -> None:
    entries = [bytes(byte % 3 for byte in entry) for entry in entries]
    passage = bytes(byte % 3 for byte in passage)
    known = [number for number in numbers if number < len(entries)]
    ends = TokenMatcher(passage, entries).ends(np.array(known, np.uint16)).tolist()
    expected, text = [], b""
    for place, number in enumerate(known):
        before, text = len(text), text + entries[number]
        if passage in text[max(0, before - len(passage) + 1) :]:
            expected.append(place)
    assert set(ends) <= set(expected)
    assert bool(ends) == bool(expected)


def test_ids_of_no_token_match_nothing() -> None:
    matcher = TokenMatcher(b"ab", [b"a", b"b"])
    assert matcher.ends(np.array([0, 9, 1, 0, 1, 2, 0, 65_535, 1], np.uint16)).tolist() == [4]
    assert matcher.ends(np.array([0, 7, 1, 0, 1, 2**31 - 1], np.int32)).tolist() == [4]


def test_a_long_passage_is_found_whole(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("CharLevelTokenizer")
    long = "".join(chr(97 + number * number % 26) for number in range(300))
    dataset = dataset_of([long[:-1], long, "x" + long + "x"], tokenizer, tmp_path / "a")
    assert list(documents_with(dataset, long, tokenizer)) == [1, 2]


def test_every_document_is_decoded_without_token_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build_tokenizer("CharLevelTokenizer")
    dataset = dataset_of(TEXTS, tokenizer, tmp_path / "a")
    assert token_matcher("fish", tokenizer) is not None
    right = tokenizer.decode
    monkeypatch.setattr(type(tokenizer), "decode", lambda self, ids: right(ids).strip())
    assert token_matcher("fish", tokenizer) is None
    assert list(documents_with(dataset, "fish", tokenizer)) == [0, 2]


def test_long_search_reports_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amount_progress, "_SECONDS_BETWEEN_LINES", 0.0)
    stream = io.StringIO()
    with report_search(1000, stream=stream) as report:
        report(250)
        report(750)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("searched 250 of 1,000 tokens  ")
    assert lines[1].startswith("searched 1,000 of 1,000 tokens  ")
    assert lines[1].endswith("0:00 left")


def test_items_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amount_progress, "_SECONDS_BETWEEN_LINES", 0.0)
    stream = io.StringIO()
    with tracked("abc", 3, "letters read", stream=stream) as letters:
        assert next(letters) == "a"
        assert stream.getvalue() == ""
        assert list(letters) == ["b", "c"]
    counts = [line.split("  ")[0] for line in stream.getvalue().splitlines()]
    assert counts == [f"{count} of 3 letters read" for count in (1, 2, 3)]
