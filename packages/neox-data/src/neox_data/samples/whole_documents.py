"""Build samples of whole documents: each sample holds as many as fit, and the rest of it is padding.

`pack_until_overflow` and `unpacked` give the arrays of GPT-NeoX's implementations of these names; `best_fit`
is ours. A sample has room for `seq_length` + 1 tokens. Documents that are longer are chopped to that, or left
out; a document with labels that are all masked is left out.

Source: the meanings of `pack_impl` and `allow_chopped` in GPT-NeoX; the algorithm of `best_fit` is best-fit
decreasing, as in arXiv:2404.10830.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from neox_data.errors import DataError
from neox_data.pluralize import pluralize
from neox_data.samples.build_index import SampleIndex

__all__ = ["IGNORED", "PACKERS", "Eligible", "build_whole_index", "find_eligible"]

# Label of a token that the loss leaves out; GPT-NeoX leaves out every negative label.
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Eligible:
    """The documents of a part that samples may contain.

    Attributes:
        is_used: bool [documents], True for documents that samples contain.
        masked: number of documents left out because none of their labels counts; the first is not looked
            at, because nothing in the document predicts it.
        late: number of documents left out because their labels count only after the tokens of a sample.
        empty: number of documents left out because they have no tokens.
        too_long: number of other documents that are longer than a sample.
        tokens_cut: tokens of these other documents that no sample contains.
    """

    is_used: np.ndarray
    masked: int
    late: int
    empty: int
    too_long: int
    tokens_cut: int

    def reasons(self, room: int, pack_impl: str) -> str:
        """Return how many documents are left out or longer than `room` tokens, in words."""
        # `unpacked` does not look at the last label of a full sample.
        late = f"labels only after {room - (pack_impl == 'unpacked'):,} tokens"
        rows = (
            (self.empty, "is empty", "are empty"),
            (self.masked, "has no label that counts", "have no label that counts"),
            (self.late, f"has {late}", f"have {late}"),
            (self.too_long, f"is longer than {room:,} tokens", f"are longer than {room:,} tokens"),
        )
        return ", ".join(pluralize(*row) for row in rows if row[0])


def find_eligible(
    documents: np.ndarray,
    sizes: np.ndarray,
    *,
    room: int,
    allow_chopped: bool,
    is_masked: Callable[[int, int | None], bool] | None,
) -> Eligible:
    """Find the documents that samples may contain.

    Args:
        documents: sequence numbers of this part of the data.
        sizes: number of tokens of every sequence of the dataset.
        room: tokens of a sample.
        allow_chopped: use the first `room` tokens of longer documents; False: leave these out.
        is_masked: returns True if no label of a sequence counts, given the number of tokens to look at
            (None: all); None: there are no labels.
    """
    lengths = sizes[documents].astype(np.int64)
    is_long = lengths > room
    is_used = (lengths > 0) & (allow_chopped | ~is_long)
    masked = np.zeros(len(lengths), bool)
    late = np.zeros(len(lengths), bool)
    if is_masked is not None:
        for place in np.flatnonzero(is_used).tolist():
            number = documents.item(place)
            if is_masked(number, room):
                is_used[place] = False
                late[place] = is_long[place] and not is_masked(number, None)
                masked[place] = not late[place]
    too_long = is_long & ~masked & ~late
    kept = np.where(is_used, np.minimum(lengths, room), 0)
    return Eligible(
        is_used,
        masked=int(masked.sum()),
        late=int(late.sum()),
        empty=int((lengths == 0).sum()),
        too_long=int(too_long.sum()),
        tokens_cut=int((lengths - kept)[too_long].sum()),
    )


def _until_overflow(
    documents: np.ndarray,
    lengths: np.ndarray,
    is_used: np.ndarray,
    *,
    room: int,
    num_samples: int,
    random: np.random.RandomState,
) -> SampleIndex:
    """Add documents in a shuffled order to a sample until the next one does not fit.

    The documents are shuffled again after each pass. As in GPT-NeoX, the last sample has one document.
    """
    shuffle = random.permutation(num_samples)
    order = np.arange(len(documents))
    taken: list[int] = []
    starts: list[int] = []
    filled = room
    while len(starts) < num_samples:
        random.shuffle(order)
        used = order[is_used[order]]
        for place, length in zip(used.tolist(), lengths[used].tolist(), strict=True):
            if filled + length > room:
                starts.append(len(taken))
                filled = 0
            taken.append(place)
            filled += length
            if len(starts) == num_samples:
                break
    return _index(documents[taken], [*starts, len(taken)], shuffle)


def _one_each(
    documents: np.ndarray,
    lengths: np.ndarray,
    is_used: np.ndarray,
    *,
    room: int,
    num_samples: int,
    random: np.random.RandomState,
) -> SampleIndex:
    """Give each sample one document, in file order, again from the first one after the last."""
    shuffle = random.permutation(num_samples)
    used = documents[is_used]
    # As in GPT-NeoX, there is one document more than samples.
    return _index(np.resize(used, num_samples + 1), range(num_samples + 1), shuffle)


def _best_fit(
    documents: np.ndarray,
    lengths: np.ndarray,
    is_used: np.ndarray,
    *,
    room: int,
    num_samples: int,
    random: np.random.RandomState,
) -> SampleIndex:
    """Put each document, longest first, into the fullest sample with room for it.

    Every pass over the documents has the same number of samples, in another order and with other documents of
    the same length together; no document is in a second sample before all are in one.
    """
    used = np.flatnonzero(is_used)
    taken: list[int] = []
    starts: list[int] = []
    shuffles: list[np.ndarray] = []
    while len(starts) < num_samples:
        random.shuffle(used)
        longest_first = used[np.argsort(-lengths[used], kind="stable")]
        samples = _fill(longest_first.tolist(), lengths[longest_first].tolist(), room)
        order = np.arange(len(starts), len(starts) + len(samples))
        random.shuffle(order)
        shuffles.append(order)
        for sample in samples:
            starts.append(len(taken))
            taken += sample
    return _index(documents[taken], [*starts, len(taken)], np.concatenate(shuffles))


def _fill(places: list[int], lengths: list[int], room: int) -> list[list[int]]:
    """Return the documents of each sample, placed by best fit in the given order."""
    samples: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(room + 1)]
    # Bit n is set if a sample has room for n tokens: the lowest one that suffices is found in one operation.
    rooms = 0
    for place, length in zip(places, lengths, strict=True):
        enough = rooms >> length
        if enough:
            left = length + (enough & -enough).bit_length() - 1
            sample = with_room[left].pop()
            if not with_room[left]:
                rooms ^= 1 << left
        else:
            left, sample = room, len(samples)
            samples.append([])
        samples[sample].append(place)
        left -= length
        if left:
            with_room[left].append(sample)
            rooms |= 1 << left
    return samples


PACKERS: dict[str, Callable[..., SampleIndex]] = {
    "pack_until_overflow": _until_overflow,
    "unpacked": _one_each,
    "best_fit": _best_fit,
}


def build_whole_index(
    pack_impl: str,
    documents: np.ndarray,
    sizes: np.ndarray,
    *,
    eligible: Eligible,
    num_samples: int,
    seq_length: int,
    seed: int,
) -> SampleIndex:
    """Build the order of at least `num_samples` samples of whole documents.

    Args:
        pack_impl: a key of `PACKERS`.
        documents: sequence numbers of this part of the data, in file order.
        sizes: number of tokens of every sequence of the dataset.
        eligible: the documents that samples may contain.
        num_samples: number of samples required.
        seq_length: number of predicted tokens per sample; a sample has room for one more.
        seed: random seed of all shuffles.

    Raises:
        DataError: no document may be used.
    """
    room = seq_length + 1
    if not eligible.is_used.any():
        raise DataError(
            f"no document can be used: of {len(documents):,}, {eligible.reasons(room, pack_impl)}; increase "
            "seq-length, set allow-chopped: true, or use other documents or labels",
            code="nothing-usable",
        )
    return PACKERS[pack_impl](
        np.asarray(documents, np.int32),
        np.minimum(sizes[documents].astype(np.int64), room),
        eligible.is_used,
        room=room,
        num_samples=num_samples,
        random=np.random.RandomState(seed),
    )


def _index(documents: np.ndarray, starts: list[int] | range, shuffle: np.ndarray) -> SampleIndex:
    rows = np.zeros((len(starts), 2), np.int64)
    rows[:, 0] = starts
    return SampleIndex(documents, rows, shuffle)
