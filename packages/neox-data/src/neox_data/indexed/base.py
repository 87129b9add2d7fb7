"""The contract of an indexed dataset: sequences of tokens by number, and their lengths."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from neox_data.errors import IndexedDatasetError
from neox_data.indexed.index import DatasetIndex
from neox_data.indexed.layout import idx_path

__all__ = ["IndexedDataset", "TokenSource"]


class TokenSource(Protocol):
    """The tokens of a `.bin`: an array, or what gives arrays of it."""

    def __getitem__(self, places: slice, /) -> np.ndarray: ...


class IndexedDataset(ABC):
    """Token sequences by number; implementations differ in how they read the `.bin`.

    A dataset may be read from several threads at once.

    Args:
        prefix: path of the two files without `.bin` and `.idx`.
        index: everything that the `.idx` says.
        tokens: of the `.bin`; is asked for stretches within the file only.

    Attributes:
        prefix: path of the two files without `.bin` and `.idx`.
        index: everything that the `.idx` says.
        dtype: dtype of the tokens.
        sizes: int32 [S], tokens of each sequence.
        document_starts: int64 [D], first sequence of each document, then S; may be [0] alone.
    """

    def __init__(self, prefix: Path | str, index: DatasetIndex, tokens: TokenSource) -> None:
        self.prefix = Path(prefix)
        self.index = index
        self.dtype = index.dtype
        self.sizes = index.sizes
        self.document_starts = index.document_starts
        self._tokens = tokens
        # Looked up for each piece of each sample. A start is divided by a power of two to count tokens.
        self._size_of, self._start_of, self._num_tokens = (
            index.sizes.item,
            index.starts.item,
            index.num_tokens,
        )
        self._shift = (self.dtype.itemsize // index.start_bytes).bit_length() - 1
        self._fraction = (1 << self._shift) - 1

    @property
    def token_array(self) -> np.ndarray | None:
        """All tokens of the `.bin`, where they are an array; see `check_whole`."""
        return self._tokens if isinstance(self._tokens, np.ndarray) else None

    @property
    def num_tokens(self) -> int:
        """Tokens in all sequences together."""
        return self.index.num_tokens

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, sequence: int) -> np.ndarray:
        return self.get(sequence)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens `offset` to `offset + length` (None: to the end) of a sequence; the array may be read-only.

        Raises:
            IndexError: there is no such sequence, or it has no such tokens.
            IndexedDatasetError: the index gives a place outside of the `.bin`.
        """
        if not 0 <= sequence < len(self.sizes):
            raise IndexError(f"sequence {sequence} of {self.prefix}, which has {len(self.sizes):,}")
        size = self.sizes.item(sequence)
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(
                f"{length} tokens from {offset} of sequence {sequence} of {self.prefix}, which has {size}"
            )
        self.check_whole()
        first = self.first_token(sequence) + offset
        return self._tokens[first : first + length]

    def first_token(self, sequence: int) -> int:
        """Where a sequence begins, counted in tokens of the `.bin`.

        Raises:
            IndexedDatasetError: the index gives a place outside of the `.bin`.
        """
        start = self._start_of(sequence)
        first: int = start >> self._shift
        if start & self._fraction or first < 0 or first + self._size_of(sequence) > self._num_tokens:
            raise self._misplaced(sequence)
        return first

    def _misplaced(self, sequence: int) -> IndexedDatasetError:
        place = self._start_of(sequence) * self.index.start_bytes
        return IndexedDatasetError(
            f"{idx_path(self.prefix)} puts sequence {sequence:,} at byte {place:,}, outside of its .bin; "
            "copy the file again or make it again with preprocess_data"
        )

    def get_across(self, sequences: Sequence[int], offset: int, end: int) -> np.ndarray:
        """The tokens from `offset` of the first of some sequences to `end`, included, of the last; int64.

        Raises:
            IndexError: there is no such sequence, or the first or the last one has no such token.
            IndexedDatasetError: the index gives a place outside of the `.bin`.
        """
        self.check_whole()
        # `first_token`, written out: calls for each piece would take as long as copying its tokens.
        tokens, start_of, size_of = self._tokens, self._start_of, self._size_of
        shift, fraction, num_tokens = self._shift, self._fraction, self._num_tokens
        parts, last = [], len(sequences) - 1
        for number, sequence in enumerate(sequences):
            start, size = start_of(sequence), size_of(sequence)
            first = start >> shift
            if start & fraction or first < 0 or first + size > num_tokens:
                raise self._misplaced(sequence)
            stop = size if number < last else end + 1
            if not 0 <= offset <= stop <= size or end < 0 or sequence < 0:
                raise IndexError(
                    f"tokens {offset} to {stop - 1} of sequence {sequence} of {self.prefix}, which has {size}"
                )
            parts.append(tokens[first + offset : first + stop])
            offset = 0
        return np.concatenate(parts, dtype=np.int64)

    def token_range(self, sequences: range) -> tuple[int, int]:
        """Where consecutive sequences begin, and how many tokens they have, counted in tokens of the `.bin`.

        Only the ends are looked at; `neox-data verify` checks that there are no gaps between.

        Raises:
            IndexedDatasetError: the last of them does not lie behind the first.
        """
        if not sequences:
            return 0, 0
        first = self.first_token(sequences[0])
        num_tokens = self.first_token(sequences[-1]) + self.sizes.item(sequences[-1]) - first
        if sequences.step != 1 or num_tokens < 0:
            raise IndexedDatasetError(
                f"{idx_path(self.prefix)}: sequences {sequences[0]:,} to {sequences[-1]:,} do not lie one "
                "after another; make the data again with preprocess_data"
            )
        return first, num_tokens

    def sequence_at(self, token: int, sequences: range) -> int:
        """The last of consecutive sequences that begins at or before a token of the `.bin`."""
        starts = self.index.starts[sequences.start : sequences.stop]
        place = token * self.dtype.itemsize // self.index.start_bytes
        return sequences.start + int(np.searchsorted(starts, place, side="right")) - 1

    def get_tokens(self, first: int, length: int) -> np.ndarray:
        """Tokens of the `.bin` by their place, whatever sequences they are of; the array may be read-only.

        Raises:
            IndexError: the `.bin` has no such tokens.
        """
        if first < 0 or length < 0 or first + length > self.num_tokens:
            raise IndexError(
                f"{length:,} tokens from {first:,} of {self.prefix}, which has {self.num_tokens:,}"
            )
        self.check_whole()
        return self._tokens[first : first + length]

    @abstractmethod
    def check_whole(self) -> None:
        """Make sure, as far as reading does not find out, that the `.bin` is still as long as it was.

        Raises:
            IndexedDatasetError: it is shorter.
        """
