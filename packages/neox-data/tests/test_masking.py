"""Masked samples against a plain reading of BERT's rules: which tokens, by what, and where a sample ends."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from neox_data.errors import TokenizerError
from neox_data.masking import MaskedDataset, Masking, WordEdges, mask_tokens
from neox_data.random_draws import RandomDraws
from neox_data.samples.whole_documents import IGNORED
from neox_data.tokenizers import Tokenizer, build_tokenizer
from support.refusals import refused

MASK, PADDING, END = 99, 98, 0
TEXT = np.arange(1, 51)


def masking(**changes) -> Masking:
    options = {"mask": MASK, "text_ids": TEXT, "probability": 0.15, "short_probability": 0.0}
    return Masking(**options | {"padding": PADDING} | changes)


def samples(count: int, length: int) -> np.ndarray:
    return np.random.default_rng(1).integers(1, 51, (count, length))


class Items:
    """Items of tokens, or of tokens and labels with padding behind `sizes` tokens."""

    def __init__(self, rows: np.ndarray, sizes: Sequence[int] | None = None) -> None:
        self.rows, self.sizes = rows, sizes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> np.ndarray:
        if self.sizes is None:
            return self.rows[item]
        labels = self.rows[item].copy()
        labels[self.sizes[item] :] = IGNORED
        return np.stack([self.rows[item], labels])


def within(found: float, share: float, count: int) -> bool:
    """Whether a share of independent events is within five standard deviations of its probability."""
    return abs(found - share) < 5 * math.sqrt(share * (1 - share) / count)


def test_shares_are_those_of_bert() -> None:
    """15 % are chosen; of these 80 % are masked, 10 % random and 10 % as they were: counted in float64."""
    rows, length = samples(4_000, 60), 60
    chosen = masked = same = 0
    replaced = []
    for number, row in enumerate(rows):
        inputs, labels = mask_tokens(row, masking(), RandomDraws(f"{number}"))
        is_chosen = labels != IGNORED
        assert int(is_chosen.sum()) == round(0.15 * length)
        assert (labels[is_chosen] == row[is_chosen]).all()
        assert (inputs[~is_chosen] == row[~is_chosen]).all()
        chosen += int(is_chosen.sum())
        masked += int((inputs[is_chosen] == MASK).sum())
        is_other = is_chosen & (inputs != MASK) & (inputs != row)
        same += int((is_chosen & (inputs == row)).sum())
        replaced += inputs[is_other].tolist()
    assert chosen == 4_000 * 9
    assert within(masked / chosen, 0.8, chosen)
    # A random token is the token itself once in 50.
    assert within(same / chosen, 0.1 + 0.1 / 50, chosen)
    assert within(len(replaced) / chosen, 0.1 * 49 / 50, chosen)
    counts = np.bincount(replaced, minlength=51)[1:].astype(np.float64)
    expected = len(replaced) / 50
    # Chi-squared with 49 degrees of freedom: 100 is exceeded once in 25,000 times.
    assert ((counts - expected) ** 2 / expected).sum() < 100
    assert set(replaced) == set(TEXT.tolist())


def test_every_place_is_chosen_equally_often() -> None:
    counts = np.zeros(20)
    for number in range(8_000):
        _, labels = mask_tokens(np.arange(1, 21), masking(), RandomDraws(f"{number}"))
        counts += labels != IGNORED
    assert all(within(count / 8_000, 3 / 20, 8_000) for count in counts)


@pytest.mark.parametrize("probability", [0.01, 0.15, 0.5, 1.0])
def test_special_tokens_are_never_chosen_and_one_token_always_is(probability: float) -> None:
    row = np.array([END, 5, 60, 6, END, MASK, 7, END])
    inputs, labels = mask_tokens(row, masking(probability=probability), RandomDraws("x"))
    is_text = np.isin(row, TEXT)
    assert (labels[~is_text] == IGNORED).all()
    assert (inputs[~is_text] == row[~is_text]).all()
    assert int((labels != IGNORED).sum()) == max(1, round(probability * 3))
    nothing, labels = mask_tokens(np.array([END, 60]), masking(), RandomDraws("x"))
    assert (nothing.tolist(), labels.tolist()) == ([END, 60], [IGNORED, IGNORED])


def test_items_depend_on_key_and_number_alone() -> None:
    items = Items(np.tile(samples(1, 41), (3, 1)))
    found = [MaskedDataset(items, masking(), length=40, key="7 train")[item].tolist() for item in range(3)]
    assert found[0] != found[1] != found[2]
    again = MaskedDataset(items, masking(), length=40, key="7 train")
    assert [again[item].tolist() for item in (2, 0, 1)] == [found[2], found[0], found[1]]
    assert MaskedDataset(items, masking(), length=40, key="7 valid")[0].tolist() != found[0]
    assert MaskedDataset(items, masking(), length=40, key="8 train")[0].tolist() != found[0]


def test_a_sample_is_cut_to_a_random_length_with_its_probability() -> None:
    items = Items(samples(4_000, 11))
    dataset = MaskedDataset(items, masking(short_probability=0.4), length=10, key="7 train")
    sizes = []
    for item in range(len(items)):
        tokens, labels, is_content = dataset[item]
        size = int(is_content.sum())
        assert (is_content[:size] == 1).all()
        assert (tokens[size:] == PADDING).all()
        assert (labels[size:] == IGNORED).all()
        assert int((labels != IGNORED).sum()) == max(1, round(0.15 * size))
        sizes.append(size)
    # Lengths from 2 to 10 are equally likely, and 10 is also the length of a sample that is not cut.
    counts = np.bincount(sizes, minlength=11)
    assert (counts[:2] == 0).all()
    assert all(within(count / 4_000, 0.4 / 9, 4_000) for count in counts[2:10])
    assert within(counts[10] / 4_000, 0.6 + 0.4 / 9, 4_000)


def test_padding_of_whole_documents_stays_padding() -> None:
    dataset = MaskedDataset(Items(samples(2, 12), sizes=[12, 5]), masking(), length=12, key="k")
    assert [int(dataset[item][2].sum()) for item in (0, 1)] == [12, 5]
    assert dataset[1][0, 5:].tolist() == [PADDING] * 7
    assert int((dataset[1][1] != IGNORED).sum()) == 1


@pytest.fixture
def tokenizer(tokenizer_json: Path) -> Tokenizer:
    return build_tokenizer("HFTokenizer", vocab_file=tokenizer_json)


def text_ids(tokenizer: Tokenizer) -> np.ndarray:
    return np.array(sorted(set(range(tokenizer.vocab_size)) - tokenizer.special_ids))


@pytest.mark.parametrize("kind", ["HFTokenizer", "CharLevelTokenizer"])
def test_words_are_masked_whole(tokenizer: Tokenizer, kind: str) -> None:
    tokenizer = build_tokenizer(kind) if kind == "CharLevelTokenizer" else tokenizer
    text = "def sum_of(values):\n    return the_value + caf\u00e9 * 12 # the quick brown fox, lazy dog."
    words = {"def", "sum_of", "values", "return", "the_value", "caf\u00e9", "12", "the", "quick", "brown"}
    tokens = np.array(tokenizer.encode(text))
    options = masking(text_ids=text_ids(tokenizer), probability=0.3, words=WordEdges(tokenizer))
    seen = set()
    for number in range(200):
        _, labels = mask_tokens(tokens, options, RandomDraws(f"{number}"))
        is_chosen = labels != IGNORED
        assert 1 <= is_chosen.sum() <= round(0.3 * len(tokens))
        # Every maximal run of chosen tokens is a run of whole words and signs.
        runs = np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(is_chosen)) + 1)
        for run in runs:
            if not is_chosen[run[0]]:
                continue
            found = tokenizer.decode(tokens[run].tolist())
            before = tokenizer.decode(tokens[: run[0]].tolist())[-1:]
            after = tokenizer.decode(tokens[run[-1] + 1 :].tolist())[:1]
            assert not (is_word(before) and is_word(found[:1])), (before, found)
            assert not (is_word(found[-1:]) and is_word(after)), (found, after)
            seen.add(found.strip())
    assert words & seen


def is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def test_a_word_longer_than_what_is_masked_is_masked_in_part() -> None:
    tokenizer = build_tokenizer("CharLevelTokenizer")
    tokens = np.array(tokenizer.encode("abcdefghijklmnopqrst"))
    options = masking(text_ids=text_ids(tokenizer), words=WordEdges(tokenizer))
    _, labels = mask_tokens(tokens, options, RandomDraws("x"))
    assert np.flatnonzero(labels != IGNORED).tolist() == [0, 1, 2]


def test_a_tokenizer_without_bytes_has_no_words(tokenizer: Tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(type(tokenizer), "token_bytes", lambda self: None)
    with refused(TokenizerError, "mask-whole-words", code="not-bytes"):
        WordEdges(tokenizer)


def test_the_masks_are_those_of_every_version() -> None:
    """Written down, so that another numpy or another way to draw changes no resumed run."""
    row = np.arange(1, 13)
    inputs, labels = mask_tokens(row, masking(probability=0.4), RandomDraws("7 train masks 3"))
    assert inputs.tolist() == [1, 2, 3, MASK, 5, 6, MASK, 8, 9, MASK, MASK, 12]
    assert np.flatnonzero(labels != IGNORED).tolist() == [0, 3, 6, 9, 10]
