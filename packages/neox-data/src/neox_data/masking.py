"""Mask tokens for a model that predicts them from all others, as BERT does.

A share of the tokens of a sample is chosen. Of these, 80 % are replaced by the mask token, 10 % by a random
token, and 10 % stay; the model predicts all of them. A sample can be cut to a random length; what is behind
its end is padding.

Source: arXiv:1810.04805, section 3.1 and appendix A.2; whole words and short samples as in the authors' code.
"""

from dataclasses import dataclass

import numpy as np

from neox_data.blend import SampleDataset
from neox_data.random_draws import RandomDraws
from neox_data.samples.whole_documents import IGNORED
from neox_data.token_texts import token_texts
from neox_data.tokenizers.base import Tokenizer

__all__ = ["MaskedDataset", "Masking", "WordEdges", "mask_tokens"]

# Shares of the chosen tokens that are masked, and that are masked or replaced by a random token.
_MASKED, _CHANGED = 0.8, 0.9
_SHORTEST = 2


class WordEdges:
    """The tokens that begin, and those that end, with a letter, a digit, an underscore or beyond ASCII.

    Attributes:
        begins: bool [vocabulary], True for tokens that begin with such a character.
        ends: the same for their ends.

    Raises:
        TokenizerError: the texts are not the bytes of the tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = token_texts(
            tokenizer, required_by="mask-whole-words", otherwise="words are unknown; set it to false"
        )
        self.begins = np.array([_is_of_word(text[:1]) for text in texts], bool)
        self.ends = np.array([_is_of_word(text[-1:]) for text in texts], bool)


def _is_of_word(character: bytes) -> bool:
    return character.isalnum() or character == b"_" or character >= b"\x80"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Masking:
    """How samples are masked.

    Args:
        mask: id of the mask token.
        text_ids: ids that can be chosen, and that replace others; int64, increasing.
        probability: share of the tokens that are chosen.
        short_probability: probability that a sample is cut.
        padding: id behind the end of a sample.
        words: if given, whole words are chosen.
    """

    mask: int
    text_ids: np.ndarray
    probability: float
    short_probability: float
    padding: int
    words: WordEdges | None = None

    def is_text(self, tokens: np.ndarray) -> np.ndarray:
        """Return True for tokens that can be chosen."""
        places = np.searchsorted(self.text_ids, tokens).clip(max=len(self.text_ids) - 1)
        return np.asarray(self.text_ids[places] == tokens)


def mask_tokens(tokens: np.ndarray, masking: Masking, draws: RandomDraws) -> tuple[np.ndarray, np.ndarray]:
    """Return the input of the model, and the labels: the tokens that are chosen, -100 for others.

    At least one token is chosen, unless none is a part of a text.

    Args:
        tokens: int64 [tokens].
        masking: how they are masked.
        draws: the random draws of this sample.
    """
    inputs, labels = tokens.copy(), np.full_like(tokens, IGNORED)
    chosen = _choose(tokens, masking, draws)
    labels[chosen] = tokens[chosen]
    chances, others = draws.uniform(2, len(chosen))
    random_ids = masking.text_ids[(others * len(masking.text_ids)).astype(np.int64)]
    changed = np.where(chances < _MASKED, masking.mask, random_ids)
    inputs[chosen] = np.where(chances < _CHANGED, changed, tokens[chosen])
    return inputs, labels


def _choose(tokens: np.ndarray, masking: Masking, draws: RandomDraws) -> np.ndarray:
    """Return the places of the chosen tokens."""
    is_text = masking.is_text(tokens)
    places = np.flatnonzero(is_text)
    if not len(places):
        return places
    count = max(1, round(masking.probability * len(places)))
    if masking.words is None:
        return places[np.argsort(draws.uniform(len(places)), kind="stable")[:count]]
    words = np.split(places, np.flatnonzero(_begins_word(tokens, is_text, masking.words)[places])[1:])
    return _fitting(words, count, np.argsort(draws.uniform(len(words)), kind="stable"))


def _begins_word(tokens: np.ndarray, is_text: np.ndarray, words: WordEdges) -> np.ndarray:
    """Return True for tokens that do not continue the word of the token before."""
    begins = np.ones(len(tokens), bool)
    both = np.flatnonzero(is_text[1:] & is_text[:-1])
    begins[both + 1] = ~(words.ends[tokens[both]] & words.begins[tokens[both + 1]])
    return begins


def _fitting(words: list[np.ndarray], count: int, order: np.ndarray) -> np.ndarray:
    """Return the places of words in a random order, without those that would exceed the number of tokens."""
    taken, left = [], count
    for number in order.tolist():
        if len(words[number]) <= left:
            taken.append(words[number])
            left -= len(words[number])
        if not left:
            break
    # Every word is longer: a part of the first one.
    return np.concatenate(taken) if taken else words[int(order[0])][:count]


class MaskedDataset:
    """The items of a dataset, masked.

    An item depends only on the item of the dataset, its number, `key` and the masking.

    Args:
        dataset: items of at least `length` tokens, or of tokens and labels that leave out padding alone.
        masking: how they are masked.
        length: number of tokens of an item.
        key: random seed and name of the part.
    """

    def __init__(self, dataset: SampleDataset, masking: Masking, *, length: int, key: str) -> None:
        self._dataset = dataset
        self._masking = masking
        self._length = length
        self._key = key

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, item: int) -> np.ndarray:
        """Return an item, int64 [3, length]: the input, the labels, and 1 for tokens, 0 for padding."""
        given = self._dataset[item][..., : self._length]
        tokens, labels = (given, given) if given.ndim == 1 else given
        draws = RandomDraws(f"{self._key} masks {item}")
        size = int((labels != IGNORED).sum())
        chance, share = draws.uniform(2).tolist()
        if chance < self._masking.short_probability:
            size = min(size, _SHORTEST + int(share * (self._length - _SHORTEST + 1)))
        rows = np.empty((3, self._length), np.int64)
        rows[0], rows[1], rows[2] = self._masking.padding, IGNORED, 0
        rows[0, :size], rows[1, :size] = mask_tokens(tokens[:size], self._masking, draws)
        rows[2, :size] = 1
        return rows
