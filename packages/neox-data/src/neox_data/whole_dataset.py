"""Samples of whole documents by index, padded to `seq_length` + 1 tokens, with their labels."""

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from neox_data.errors import DataError
from neox_data.indexed.base import IndexedDataset
from neox_data.labels import check_labels
from neox_data.samples.build_index import SampleIndex
from neox_data.samples.index_cache import Origin, load_or_build_whole
from neox_data.samples.whole_documents import IGNORED, build_whole_index, find_eligible

__all__ = ["WholeDocumentDataset"]

logger = logging.getLogger(__name__)

_PADDING = 0
# Labels that are read at once to hash them.
_HASHED_LABELS = 1 << 20


class WholeDocumentDataset:
    """The samples of one part of an indexed dataset, each of whole documents and padding.

    Item k depends only on the data, the labels, and the arguments from `documents` to `allow_chopped`. Items
    may be read by several threads concurrently, and several processes may construct the same dataset: one
    builds its index.

    Args:
        indexed: the tokens.
        labels: one label per token; negative ones do not count. None: every token is a label.
        name: name of this part, such as `train`; part of the names of the index files.
        documents: sequence numbers of this part, in file order.
        num_samples: number of samples that will be read; the dataset has at least as many.
        seq_length: tokens that a sample predicts.
        seed: random seed of the order of documents and samples.
        pack_impl: how samples are made of documents; a key of `PACKERS`.
        allow_chopped: use the beginning of documents that are longer than a sample; False: leave them out.
        prefix: path of the data; the index files are in the same folder.
        cache_dir: folder of the index files if that folder is not writable; None: a folder in the user's
            cache.

    Attributes:
        num_documents: documents of this part.
        num_tokens: tokens of these documents.
        epochs: passes over the documents that are used, rounded up.

    Raises:
        DataError: no document can be used, the labels are not those of the tokens, or the index cannot be
            stored.
        IndexedDatasetError: the data does not have all these documents.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        *,
        labels: IndexedDataset | None,
        name: str,
        documents: np.ndarray,
        num_samples: int,
        seq_length: int,
        seed: int,
        pack_impl: str,
        allow_chopped: bool,
        prefix: Path | str,
        cache_dir: Path | str | None = None,
    ) -> None:
        if not len(documents):
            raise DataError(
                f"the part {name!r} of {prefix} has no documents; give it a larger share of the split, or "
                "separate data"
            )
        indexed.check_sequences(int(np.min(documents)), int(np.max(documents)))
        if labels is not None:
            check_labels(indexed, labels)
        self.name = name
        self.indexed = indexed
        self.seq_length = seq_length
        self._labels = labels
        documents = np.asarray(documents, np.int32)

        def build() -> SampleIndex:
            # As in GPT-NeoX, whose `unpacked` does not look at the last label of a full sample.
            is_masked = None if labels is None else _masks_of(labels, one_less=int(pack_impl == "unpacked"))
            eligible = find_eligible(
                documents,
                indexed.sizes,
                room=seq_length + 1,
                allow_chopped=allow_chopped,
                is_masked=is_masked,
            )
            reasons = eligible.reasons(seq_length + 1, pack_impl)
            logger.info(
                "%s, part %s: %d of %d documents are used; %d tokens of long ones are left out%s",
                indexed.prefix,
                name,
                eligible.is_used.sum(),
                len(documents),
                eligible.tokens_cut,
                f" ({reasons})" if reasons else "",
            )
            return build_whole_index(
                pack_impl,
                documents,
                indexed.sizes,
                eligible=eligible,
                num_samples=num_samples,
                seq_length=seq_length,
                seed=seed,
            )

        self.index = load_or_build_whole(
            build,
            _origin(indexed, labels, documents),
            prefix=Path(prefix),
            name=name,
            num_samples=num_samples,
            seq_length=seq_length,
            seed=seed,
            pack_impl=pack_impl,
            allow_chopped=allow_chopped,
            cache_dir=None if cache_dir is None else Path(cache_dir),
        )
        self.num_documents = len(documents)
        self.num_tokens = int(indexed.sizes[documents].sum(dtype=np.int64))
        is_in = np.zeros(len(indexed.sizes), bool)
        is_in[self.index.documents] = True
        self._used = int(is_in.sum())
        self.epochs = math.ceil(self.passes(len(self)))

    def __len__(self) -> int:
        return len(self.index.shuffle)

    def __getitem__(self, item: int) -> np.ndarray:
        """Return tokens and labels of an item, int64 [2, seq_length + 1]; padding is 0, its labels -100."""
        filled = np.empty((2, self.seq_length + 1), np.int64)
        filled[0], filled[1] = _PADDING, IGNORED
        begin = 0
        for sequence, _, length in self.pieces(item):
            end = begin + length
            filled[0, begin:end] = self.indexed.get(sequence, 0, length)
            filled[1, begin:end] = (
                filled[0, begin:end] if self._labels is None else self._labels.get(sequence, 0, length)
            )
            begin = end
        return filled

    def pieces(self, item: int) -> Iterator[tuple[int, int, int]]:
        """Yield the documents of an item: (sequence, first token, number of tokens).

        Raises:
            IndexError: there is no such item.
        """
        if not 0 <= item < len(self):
            raise IndexError(
                f"item {item} of the part {self.name!r} of {self.indexed.prefix}, which has {len(self):,}"
            )
        sample = self.index.shuffle.item(item)
        first, stop = self.index.starts[sample : sample + 2, 0].tolist()
        for sequence in self.index.documents[first:stop].tolist():
            yield sequence, 0, min(self.indexed.sizes.item(sequence), self.seq_length + 1)

    def passes(self, num_samples: int) -> float:
        """Return how often the first items contain a document, on average over the documents that are used.

        Args:
            num_samples: number of items, at most the length.
        """
        documents = np.diff(self.index.starts[:, 0])
        return float(documents[self.index.shuffle[:num_samples]].sum()) / self._used

    def items_with(self, sequence: int) -> np.ndarray:
        """Return the sorted items with a sequence, int64; none for a sequence that no sample contains.

        Searches the whole order once.
        """
        places = np.flatnonzero(self.index.documents == sequence)
        samples = np.searchsorted(self.index.starts[:, 0], places, side="right") - 1
        return np.flatnonzero(np.isin(self.index.shuffle, samples[samples < len(self)]))


def _masks_of(labels: IndexedDataset, *, one_less: int) -> Callable[[int, int | None], bool]:
    """Return a function that returns True if no label of a sequence counts that the sequence predicts.

    Args:
        labels: the labels of all sequences.
        one_less: tokens at the end of a full sample whose labels are not looked at.
    """

    def is_masked(sequence: int, first: int | None) -> bool:
        size = labels.sizes.item(sequence)
        looked_at = size if first is None else min(size, first - one_less)
        # Nothing in a document predicts its first token.
        return bool((labels.get(sequence, 1, max(1, looked_at) - 1) == IGNORED).all())

    return is_masked


def _origin(indexed: IndexedDataset, labels: IndexedDataset | None, documents: np.ndarray) -> Origin:
    """Return what decides the index: sizes and labels, by which documents are left out."""

    def arrays() -> Iterator[np.ndarray]:
        yield indexed.sizes
        if labels is not None:
            yield labels.index.starts
            for first in range(0, labels.num_tokens, _HASHED_LABELS):
                yield labels.get_tokens(first, min(_HASHED_LABELS, labels.num_tokens - first))

    stamps = [each.index.stamp for each in (indexed, labels) if each is not None]
    return Origin.of(documents, arrays, " ".join(stamps) if all(stamps) else "")
