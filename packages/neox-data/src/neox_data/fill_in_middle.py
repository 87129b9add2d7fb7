"""Fill in the middle: move a part of a document to its end, so that a causal model learns to fill gaps.

A document is cut at two random tokens into a prefix, a middle and a suffix, which a model then reads in one
of two orders, with a special token before each part:

    PSM:  <prefix> prefix <suffix> suffix <middle> middle
    SPM:  <prefix> <suffix> suffix <middle> prefix middle

Source: arXiv:2207.14255, sections 3 and 4.3 (at the level of tokens; SPM in the variant that is trained
jointly with PSM).
"""

from dataclasses import dataclass

import numpy as np

from neox_data.blend import SampleDataset
from neox_data.random_draws import RandomDraws
from neox_data.samples.whole_documents import IGNORED

__all__ = ["FillInMiddleDataset", "MiddleTokens", "fill_in_middle"]

# Of a shorter document, prefix, middle and suffix could not each have a token.
_FEWEST_TOKENS = 3
_DRAWS_PER_DOCUMENT = 4


@dataclass(frozen=True, slots=True)
class MiddleTokens:
    """The special tokens before the parts of a document, and the one that ends documents."""

    prefix: int
    middle: int
    suffix: int
    end_of_document: int


def fill_in_middle(
    tokens: np.ndarray, special: MiddleTokens, draws: RandomDraws, *, rate: float, spm_rate: float
) -> np.ndarray:
    """Return the tokens of documents, some of which are rearranged; each of these has three tokens more.

    The beginning of a document that the tokens continue, and the part of one that they end in, count as
    documents.

    Args:
        tokens: int64 [tokens].
        special: the special tokens.
        draws: the random draws of this sample.
        rate: probability that a document is rearranged.
        spm_rate: probability that its order is SPM.
    """
    ends = np.flatnonzero(tokens == special.end_of_document)
    documents = np.split(tokens, ends + 1)
    chances = draws.uniform(len(documents), _DRAWS_PER_DOCUMENT)
    parts: list[np.ndarray] = []
    before_prefix, before_suffix, before_middle = (
        np.array([token]) for token in (special.prefix, special.suffix, special.middle)
    )
    for document, (chance, order, *cuts) in zip(documents, chances.tolist(), strict=True):
        has_end = len(document) > 0 and document[-1] == special.end_of_document
        body, end = (document[:-1], document[-1:]) if has_end else (document, document[:0])
        if len(body) < _FEWEST_TOKENS or chance >= rate:
            parts.append(document)
            continue
        places = sorted(int(cut * (len(body) + 1)) for cut in cuts)
        prefix, middle, suffix = np.split(body, places)
        if order < spm_rate:
            parts += [before_prefix, before_suffix, suffix, before_middle, prefix, middle, end]
        else:
            parts += [before_prefix, prefix, before_suffix, suffix, before_middle, middle, end]
    return np.concatenate(parts)


class FillInMiddleDataset:
    """The items of a dataset, with some of their documents rearranged.

    An item keeps its length: what no longer fits behind the added tokens is left out. It depends only on the
    item, its number, `seed` and the rates. Padding, of items with labels, stays behind the documents.

    Args:
        dataset: items of tokens, or of tokens and labels that leave out padding alone.
        special: the special tokens.
        seed: random seed.
        rate: probability that a document is rearranged.
        spm_rate: probability that the order of a rearranged document is SPM.
    """

    def __init__(
        self, dataset: SampleDataset, special: MiddleTokens, *, seed: int, rate: float, spm_rate: float
    ) -> None:
        self._dataset = dataset
        self._special = special
        self._seed, self._rate, self._spm_rate = seed, rate, spm_rate

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, item: int) -> np.ndarray:
        """Return the tokens of an item, or its tokens and labels, in the shape of the dataset's item."""
        given = self._dataset[item]
        tokens = given if given.ndim == 1 else given[0]
        content = tokens if given.ndim == 1 else tokens[given[1] != IGNORED]
        changed = fill_in_middle(
            content,
            self._special,
            RandomDraws(f"{self._seed} fill-in-middle {item}"),
            rate=self._rate,
            spm_rate=self._spm_rate,
        )[: len(tokens)]
        if given.ndim == 1:
            return changed
        filled = given.copy()
        filled[:, : len(changed)] = changed
        return filled
