"""The contract of an indexed dataset: sequences of tokens by number, and their lengths."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from neox_data.errors import IndexedDatasetError
from neox_data.indexed.index import DatasetIndex
from neox_data.indexed.layout import idx_path

__all__ = ["IndexedDataset"]


class IndexedDataset(ABC):
    """Token sequences by number; implementations differ in how they read the `.bin`.

    A dataset may be read from several threads at once.

    Attributes:
        prefix: path of the two files without `.bin` and `.idx`.
        index: everything that the `.idx` says.
        dtype: dtype of the tokens.
        sizes: int32 [S], tokens of each sequence.
        document_starts: int64 [D], first sequence of each document, then S; may be [0] alone.
    """

    def __init__(self, prefix: Path | str, index: DatasetIndex) -> None:
        self.prefix = Path(prefix)
        self.index = index
        self.dtype = index.dtype
        self.sizes = index.sizes
        self.document_starts = index.document_starts
        # Looked up for each piece of each sample.
        self._starts, self._start_bytes = index.starts, index.start_bytes
        self._token_bytes, self._num_tokens = self.dtype.itemsize, index.num_tokens

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
        self._check_whole()
        return self._read(self.first_token(sequence) + offset, length)

    def first_token(self, sequence: int) -> int:
        """Where a sequence begins, counted in tokens of the `.bin`.

        Raises:
            IndexedDatasetError: the index gives a place outside of the `.bin`.
        """
        return self._place(sequence)[0]

    def _place(self, sequence: int) -> tuple[int, int]:
        """First token and number of tokens of a sequence; within the `.bin`."""
        size = self.sizes.item(sequence)
        start_bytes = self._starts.item(sequence) * self._start_bytes
        first, rest = divmod(start_bytes, self._token_bytes)
        if rest or first < 0 or first + size > self._num_tokens:
            raise IndexedDatasetError(
                f"{idx_path(self.prefix)} puts sequence {sequence:,} at byte {start_bytes:,}, outside of its "
                ".bin; copy the file again or make it again with preprocess_data"
            )
        return first, size

    def get_across(self, sequences: Sequence[int], offset: int, end: int) -> np.ndarray:
        """The tokens from `offset` of the first of some sequences to `end`, included, of the last; int64.

        Raises:
            IndexError: the last sequence has no such token.
            IndexedDatasetError: the index gives a place outside of the `.bin`.
        """
        self._check_whole()
        *crossed, last = sequences
        parts = []
        for sequence in crossed:
            first, size = self._place(sequence)
            parts.append(self._read(first + offset, size - offset))
            offset = 0
        first, size = self._place(last)
        if not 0 <= offset <= end < size:
            raise IndexError(
                f"tokens {offset} to {end} of sequence {last} of {self.prefix}, which has {size}"
            )
        parts.append(self._read(first + offset, end + 1 - offset))
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
        self._check_whole()
        return self._read(first, length)

    @abstractmethod
    def _check_whole(self) -> None:
        """Make sure, as far as `_read` does not, that the `.bin` is still as long as it was.

        Raises:
            IndexedDatasetError: it is shorter.
        """

    @abstractmethod
    def _read(self, first: int, length: int) -> np.ndarray:
        """`length` tokens of the `.bin` from its token `first`; both are within the file."""
