"""The interface of tokenizers: encode text, decode ids, and the special ids."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from itertools import chain

import numpy as np

from neox_data.tokenizers.continued import ContinuedText

__all__ = ["Tokenizer", "flattened"]


def flattened(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the concatenated ids of texts, and the number of ids of each, int64."""
    sizes = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.fromiter(chain.from_iterable(rows), np.int32, int(sizes.sum())), sizes


class Tokenizer(ABC):
    """Converts text to token ids and back."""

    vocab_size: int
    """Number of ids, including added ones, before the model's padding."""
    end_of_document: int
    """Id of the end-of-document token."""
    padding: int | None
    """Id of the padding token; None if the vocabulary has none."""

    @property
    def largest_id(self) -> int:
        """Return the largest id that is used."""
        return self.vocab_size - 1

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """Return the id of the token with this text; None if the vocabulary does not contain it."""

    def entry(self, number: int) -> str | None:
        """Return the vocabulary's entry of an id, as its files write it; None if it has none."""
        return None

    @property
    @abstractmethod
    def special_ids(self) -> frozenset[int]:
        """Return the ids below `vocab_size` that are not parts of texts: special tokens and unused ids."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Return a hash of everything that affects encoding; equal tokenizers have equal hashes."""

    @property
    def ends_texts(self) -> bool:
        """Return True if the tokenizer itself appends the end-of-document token to each text."""
        return False

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text; may use several threads."""
        return [self.encode(text) for text in texts]

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated ids of the texts, and the number of ids of each, int64."""
        return flattened(self.encode_batch(texts))

    def encode_parts(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the same without ids that the tokenizer adds to the beginning or end of each text."""
        return self.encode_flat(texts)

    def encode_rendered(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the same as `encode_parts` of texts in which a chat template has written special tokens."""
        return self.encode_parts(texts)

    def added_ids(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids that the tokenizer adds to the beginning and to the end of a text."""
        return [], []

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, including special tokens, with spaces unchanged.

        Incomplete characters (for example at a cut) become U+FFFD.
        """

    def continued(self, context: Sequence[int] = ()) -> ContinuedText:
        """Return what decodes tokens behind others as they arrive.

        Args:
            context: ids of the tokens before.
        """
        return ContinuedText(self.decode, context, joined=self.joined_ids)

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        """The byte of each id that spells one as `<0x41>`."""
        ids = ((self.token_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
        return {number: byte for number, byte in ids if number is not None}

    @cached_property
    def joined_ids(self) -> frozenset[int]:
        """The ids whose text depends on those behind them.

        The tokenizers library decodes a run of spelled bytes to U+FFFD for each if one is not valid.
        """
        letter, invalid = self.token_id("<0x41>"), self.token_id("<0xFF>")
        if letter is None or invalid is None or self.decode([letter, invalid]).startswith("A"):
            return frozenset()
        return frozenset(self.byte_ids)

    def token_bytes(self) -> Sequence[bytes] | None:
        """Return the bytes of each id; None if a text is not the concatenation of the bytes of its ids."""
        return None
