"""The contract of a tokenizer: text to token ids and back, and the ids with a meaning of their own."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain

import numpy as np

__all__ = ["Tokenizer"]


class Tokenizer(ABC):
    """Text to token ids and back."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, added ones included, before the model pads it."""

    @property
    @abstractmethod
    def end_of_document(self) -> int:
        """The id that ends a document."""

    @property
    @abstractmethod
    def padding(self) -> int | None:
        """The id that fills unused places; None where the vocabulary has none."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of everything that decides the ids of a text; equal tokenizers have equal ones."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text; may use several threads."""
        return [self.encode(text) for text in texts]

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the texts one after another, and how many each has, int64."""
        rows = self.encode_batch(texts)
        sizes = np.fromiter(map(len, rows), np.int64, len(rows))
        return np.fromiter(chain.from_iterable(rows), np.int32, int(sizes.sum())), sizes

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special ones included, with its spaces as they are.

        Bytes that form no character (at a cut, say) become U+FFFD.
        """

    def token_bytes(self) -> Sequence[bytes] | None:
        """What each id adds to a text, by id; None where a text is more than that, one after another."""
        return None
