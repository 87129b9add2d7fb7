from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from neox_data.errors import TokenizerError
from neox_data.tokenizers import build_tokenizer, fast
from neox_data.tokenizers.char_level import CharLevelTokenizer
from neox_data.tokenizers.fast import FastEncoder, fast_encoder
from support.refusals import refused

SAMPLE = ["the quick brown fox", "", "def f(x):\n    return x<|endoftext|>\n"]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_json: Path):
    return build_tokenizer("HFTokenizer", vocab_file=tokenizer_json)


@pytest.fixture(scope="module")
def encoder(tokenizer) -> FastEncoder:
    return fast_encoder(tokenizer, lambda: SAMPLE)


def test_ids_and_sizes_equal_the_tokenizer(tokenizer, encoder) -> None:
    ids, sizes = encoder(SAMPLE)
    expected = [tokenizer.encode(text) for text in SAMPLE]
    assert ids.tolist() == list(chain(*expected))
    assert sizes.tolist() == [len(row) for row in expected]
    ids, sizes = encoder([])
    assert (len(ids), len(sizes)) == (0, 0)


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_gives_the_ids_of_the_tokenizers_library(tokenizer, encoder, text: str) -> None:
    encoder.check([text, f"word {text}<|endoftext|>{text}"])


# The first and last of several scripts and ideographs that Unicode 17 added.
@pytest.mark.parametrize(
    "letter", ["\u088f", "\u0cdc", "\U00010940", "\U0001e6c0", "\U000323b0", "\U00033479"]
)
def test_letters_that_the_two_know_differently_are_encoded_by_the_library(
    tokenizer, encoder, letter: str
) -> None:
    texts = ["plain", f"{letter}'s {letter}1", "caf\u00e9", f"a{letter}!"]
    ids, sizes = encoder(texts)
    expected = [tokenizer.encode(text) for text in texts]
    assert ids.tolist() == list(chain(*expected))
    assert sizes.tolist() == [len(row) for row in expected]


def test_the_files_of_gpt2_give_the_same_ids(tmp_path: Path, tokenizer) -> None:
    folder = tmp_path / "bpe"
    folder.mkdir()
    vocab, merges = tokenizer.library_tokenizer.model.save(str(folder))
    gpt2 = build_tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    ids, _ = fast_encoder(gpt2, lambda: SAMPLE)(SAMPLE)
    assert ids.tolist() == list(chain(*map(gpt2.encode, SAMPLE)))


def test_a_kind_that_gigatoken_does_not_know_is_refused_with_the_reason(tmp_path: Path) -> None:
    with refused(TokenizerError, "CharLevelTokenizer"):
        fast_encoder(CharLevelTokenizer(), lambda: SAMPLE)
    words = LibraryTokenizer(WordLevel({"<|endoftext|>": 0, "the": 1}, unk_token="<|endoftext|>"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "words.json"))
    with refused(TokenizerError, code="unsupported-by-gigatoken"):
        fast_encoder(build_tokenizer("HFTokenizer", vocab_file=tmp_path / "words.json"), lambda: SAMPLE)


def test_a_difference_is_found_before_and_during_the_work(tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = FastEncoder(tokenizer)
    right = FastEncoder._encode

    def wrong(self, texts):
        ids, sizes = right(self, texts)
        return np.where(ids == ids.max(initial=0), 0, ids), sizes

    monkeypatch.setattr(FastEncoder, "_encode", wrong)
    sentence = "gigatoken encodes 'the' differently from the tokenizers library"
    with refused(TokenizerError, sentence, code="encodes-differently"):
        encoder.check(["", "the"])
    with refused(TokenizerError, sentence, "--exact", code="encodes-differently"):
        encoder(["the"])


def test_a_token_at_the_beginning_of_each_text_is_the_reason_against_the_encoder(tokenizer) -> None:
    encoder = FastEncoder(tokenizer)
    plain = tokenizer.encode_batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(tokenizer), "encode_batch", lambda self, texts: [[1, *ids] for ids in plain(texts)]
        )
        with refused(TokenizerError, code="encodes-differently"):
            encoder.check(["", "the"])
        with refused(TokenizerError, "--exact", code="encodes-differently"):
            encoder([""])


def test_its_memory_of_words_is_dropped_when_it_has_grown(tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = FastEncoder(tokenizer)
    before = encoder._encoder
    encoder(["some text"])
    assert encoder._encoder is before
    monkeypatch.setattr(fast, "_MOST_GROWTH_BYTES", -(1 << 40))
    ids, _ = encoder(["some text"])
    assert encoder._encoder is not before
    assert ids.tolist() == tokenizer.encode("some text")
