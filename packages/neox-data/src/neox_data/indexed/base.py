"""Interface of an indexed dataset: sequences of tokens by index, and their lengths."""

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
    """The tokens of a `.bin`: an array, or an object that can be sliced like one."""

    def __getitem__(self, places: slice, /) -> np.ndarray: ...


class IndexedDataset(ABC):
    """Token sequences by index. Implementations differ in how they read the `.bin`.

    Several threads may read a dataset at the same time.

    Args:
        prefix: path of the two files without `.bin` and `.idx`.
        index: contents of the `.idx`.
        tokens: tokens of the `.bin`; only slices within the file are requested.

    Attributes:
        prefix: path of the two files without `.bin` and `.idx`.
        index: contents of the `.idx`.
        dtype: dtype of the tokens.
        sizes: int32 [S], number of tokens of each sequence.
        document_starts: int64 [D], first sequence of each document, then S; may be only [0].
    """

    def __init__(self, prefix: Path | str, index: DatasetIndex, tokens: TokenSource) -> None:
        self.prefix = Path(prefix)
        self.index = index
        self.dtype = index.dtype
        self.sizes = index.sizes
        self.document_starts = index.document_starts
        self._tokens = tokens
        # Used for each piece of each sample. Starts are converted to tokens by shifting (a power of two).
        self._size_of, self._start_of, self._num_tokens = (
            index.sizes.item,
            index.starts.item,
            index.num_tokens,
        )
        self._shift = (self.dtype.itemsize // index.start_bytes).bit_length() - 1
        self._fraction = (1 << self._shift) - 1

    @property
    def token_array(self) -> np.ndarray | None:
        """All tokens of the `.bin` as an array, or None; see `check_whole`."""
        return self._tokens if isinstance(self._tokens, np.ndarray) else None

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all sequences."""
        return self.index.num_tokens

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, sequence: int) -> np.ndarray:
        return self.get(sequence)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return tokens `offset` to `offset + length` (None: to the end) of a sequence, possibly read-only.

        Raises:
            IndexError: the sequence does not exist, or does not have these tokens.
            IndexedDatasetError: the index refers to a position outside the `.bin`.
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
        """Return the first token of a sequence, as an index into the `.bin`.

        Raises:
            IndexedDatasetError: the index refers to a position outside the `.bin`.
        """
        start = self._start_of(sequence)
        first: int = start >> self._shift
        if start & self._fraction or first < 0 or first + self._size_of(sequence) > self._num_tokens:
            raise self._misplaced(sequence)
        return first

    def _misplaced(self, sequence: int) -> IndexedDatasetError:
        place = self._start_of(sequence) * self.index.start_bytes
        return IndexedDatasetError(
            f"{idx_path(self.prefix)} puts sequence {sequence:,} at byte {place:,}, outside its .bin; "
            "copy the file again or create it again with preprocess_data"
        )

    def get_across(self, sequences: Sequence[int], offset: int, end: int) -> np.ndarray:
        """Return int64 tokens from `offset` of the first sequence to `end` (inclusive) of the last one.

        Raises:
            IndexError: a sequence does not exist, or the first or last one does not have the token.
            IndexedDatasetError: the index refers to a position outside the `.bin`.
        """
        self.check_whole()
        # `first_token` inlined: a call for each piece would take as long as copying its tokens.
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

    def check_sequences(self, first: int, last: int) -> None:
        """Check that all sequence numbers from `first` to `last` exist.

        Raises:
            IndexedDatasetError: one does not.
        """
        if first < 0 or last >= len(self):
            raise IndexedDatasetError(
                f"documents {first:,} to {last:,} of {self.prefix} were requested, but it has documents 0 to "
                f"{len(self) - 1:,}; correct the numbers"
            )

    def token_range(self, sequences: range) -> tuple[int, int]:
        """Return the first token and the number of tokens of consecutive sequences.

        Only the first and last sequence are checked; `neox-data verify` checks that there are no gaps.

        Raises:
            IndexedDatasetError: the last sequence does not follow the first.
        """
        if not sequences:
            return 0, 0
        first = self.first_token(sequences[0])
        num_tokens = self.first_token(sequences[-1]) + self.sizes.item(sequences[-1]) - first
        if sequences.step != 1 or num_tokens < 0:
            raise IndexedDatasetError(
                f"{idx_path(self.prefix)}: sequences {sequences[0]:,} to {sequences[-1]:,} are not "
                "contiguous; create the data again with preprocess_data",
                code="not-contiguous",
            )
        return first, num_tokens

    def sequence_at(self, token: int, sequences: range) -> int:
        """Return the last of consecutive sequences that begins at or before a token of the `.bin`."""
        starts = self.index.starts[sequences.start : sequences.stop]
        place = token * self.dtype.itemsize // self.index.start_bytes
        return sequences.start + int(np.searchsorted(starts, place, side="right")) - 1

    def get_tokens(self, first: int, length: int) -> np.ndarray:
        """Return tokens of the `.bin` by index, regardless of sequences; the array may be read-only.

        Raises:
            IndexError: the `.bin` does not have these tokens.
        """
        if first < 0 or length < 0 or first + length > self.num_tokens:
            raise IndexError(
                f"{length:,} tokens from {first:,} of {self.prefix}, which has {self.num_tokens:,}"
            )
        self.check_whole()
        return self._tokens[first : first + length]

    @abstractmethod
    def check_whole(self) -> None:
        """Check that the `.bin` has not become shorter, if reading would not detect it.

        Raises:
            IndexedDatasetError: the file is shorter.
        """
