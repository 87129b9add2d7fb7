"""Samples of whole documents, against plain definitions of each `pack_impl`."""

from itertools import chain, pairwise

import numpy as np
import pytest

from neox_data.errors import DataError
from neox_data.samples.build_index import SampleIndex
from neox_data.samples.whole_documents import build_whole_index, find_eligible
from support.refusals import refused

SEQ_LENGTH = 9
ROOM = SEQ_LENGTH + 1


def build(pack_impl, sizes, *, documents=None, masked=(), allow_chopped=True, num_samples=7, seed=3):
    sizes = np.array(sizes, np.int32)
    documents = np.arange(len(sizes)) if documents is None else np.array(documents)
    eligible = find_eligible(
        documents,
        sizes,
        room=ROOM,
        allow_chopped=allow_chopped,
        is_masked=lambda number, first: number in masked,
    )
    return build_whole_index(
        pack_impl,
        documents,
        sizes,
        eligible=eligible,
        num_samples=num_samples,
        seq_length=SEQ_LENGTH,
        seed=seed,
    )


def samples_of(index: SampleIndex) -> list[list[int]]:
    return [index.documents[first:stop].tolist() for first, stop in pairwise(index.starts[:, 0].tolist())]


def plain_overflow(sizes, num_samples, seed, skipped):
    """Fill samples document by document, with the generator calls in GPT-NeoX's order."""
    random = np.random.RandomState(seed)
    order = list(range(num_samples))
    shuffle = np.array(order)
    random.shuffle(shuffle)
    stream = np.arange(len(sizes))
    samples: list[list[int]] = []
    while True:
        random.shuffle(stream)
        for document in stream.tolist():
            if document in skipped:
                continue
            if samples and sum(sizes[other] for other in samples[-1]) + sizes[document] <= ROOM:
                samples[-1].append(document)
            else:
                samples.append([document])
            if len(samples) == num_samples:
                return samples, shuffle.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_pack_until_overflow_starts_a_sample_when_a_document_does_not_fit(seed: int) -> None:
    random = np.random.RandomState(100 + seed)
    sizes = random.randint(1, 14, size=11).tolist()
    masked = set(random.choice(11, size=2, replace=False).tolist())
    index = build("pack_until_overflow", sizes, masked=masked, num_samples=9, seed=seed)
    expected, shuffle = plain_overflow(sizes, 9, seed, masked)
    assert samples_of(index) == expected
    assert index.shuffle.tolist() == shuffle


def test_documents_that_are_not_chopped_are_left_out() -> None:
    index = build("pack_until_overflow", [4, ROOM + 1, 3, ROOM], allow_chopped=False, num_samples=12)
    assert set(chain(*samples_of(index))) == {0, 2, 3}
    assert set(chain(*samples_of(build("pack_until_overflow", [4, ROOM + 1, 3, ROOM], num_samples=12)))) == {
        *range(4)
    }


def test_unpacked_gives_each_sample_the_next_document() -> None:
    index = build("unpacked", [4, 30, 0, 3, 5], masked={3}, num_samples=7)
    assert samples_of(index) == [[0], [1], [4], [0], [1], [4], [0]]
    assert index.documents.tolist() == [0, 1, 4, 0, 1, 4, 0, 1]
    order = np.arange(7)
    np.random.RandomState(3).shuffle(order)
    assert index.shuffle.tolist() == order.tolist()


def test_only_the_documents_of_the_part_are_used() -> None:
    for pack_impl in ("unpacked", "pack_until_overflow", "best_fit"):
        index = build(pack_impl, [3] * 9, documents=[4, 5, 6])
        assert set(chain(*samples_of(index))) == {4, 5, 6}, pack_impl


@pytest.mark.parametrize("seed", range(20))
def test_best_fit_reads_each_document_once_per_pass_and_overfills_no_sample(seed: int) -> None:
    random = np.random.RandomState(seed)
    sizes = random.randint(1, 14, size=60)
    index = build("best_fit", sizes, num_samples=100, seed=seed)
    samples = samples_of(index)
    lengths = np.minimum(sizes, ROOM)
    assert max(lengths[sample].sum() for sample in samples) <= ROOM
    passes = len(index.documents) // len(sizes)
    assert len(samples) % passes == 0
    per_pass = len(samples) // passes
    assert (passes - 1) * per_pass < 100 <= passes * per_pass
    for number in range(passes):
        of_pass = [samples[place] for place in index.shuffle[number * per_pass : (number + 1) * per_pass]]
        assert sorted(chain(*of_pass)) == list(range(len(sizes)))
    assert index.shuffle.tolist() != list(range(len(samples)))


def test_best_fit_takes_the_fullest_sample_with_room() -> None:
    # Longest first: 7, 6, 4, 3, 2, 1: 4 fits after 6 only; 3 after 7 only; 2 and 1 begin a sample.
    index = build("best_fit", [2, 6, 3, 1, 7, 4], num_samples=1)
    assert sorted(map(sorted, samples_of(index))) == [[0, 3], [1, 5], [2, 4]]


def test_best_fit_wastes_less_than_overflow() -> None:
    sizes = np.random.RandomState(0).randint(1, ROOM, size=400)
    lengths = {}
    for pack_impl in ("best_fit", "pack_until_overflow"):
        samples = samples_of(build(pack_impl, sizes, num_samples=150))[:150]
        lengths[pack_impl] = sum(sizes[sample].sum() for sample in samples) / (150 * ROOM)
    assert lengths["best_fit"] > 0.95 > 0.9 > lengths["pack_until_overflow"]


def test_documents_are_counted() -> None:
    eligible = find_eligible(
        np.arange(5),
        np.array([0, 4, ROOM + 3, ROOM, 2]),
        room=ROOM,
        allow_chopped=True,
        is_masked=lambda number, first: number == 4,
    )
    assert eligible.is_used.tolist() == [False, True, True, True, False]
    assert (eligible.empty, eligible.masked, eligible.too_long, eligible.tokens_cut) == (1, 1, 1, 3)


def test_documents_that_are_left_out_are_counted_with_all_tokens() -> None:
    eligible = find_eligible(
        np.arange(2), np.array([ROOM + 3, 1]), room=ROOM, allow_chopped=False, is_masked=None
    )
    assert (eligible.too_long, eligible.tokens_cut, eligible.masked) == (1, ROOM + 3, 0)


@pytest.mark.parametrize("pack_impl", ["unpacked", "pack_until_overflow", "best_fit"])
def test_data_without_a_usable_document_is_refused(pack_impl: str) -> None:
    with refused(DataError, "of 3", "1 is empty", "1 has", "1 is longer", code="nothing-usable"):
        build(pack_impl, [0, 3, 40], masked={1}, allow_chopped=False)


def test_labels_after_the_tokens_of_a_sample_are_counted_and_named() -> None:
    sizes = np.array([ROOM + 30, ROOM + 5, 3])
    # The labels of the first begin after a sample; the second has none at all.
    eligible = find_eligible(
        np.arange(3),
        sizes,
        room=ROOM,
        allow_chopped=True,
        is_masked=lambda number, first: number != 0 or first is not None,
    )
    assert (eligible.late, eligible.masked, eligible.too_long) == (1, 2, 0)
    # The tokens of documents that are left out for another reason are not counted with the long ones.
    assert eligible.tokens_cut == 0
    with refused(DataError, "of 3", "2 have", "1 has", "10 tokens", code="nothing-usable"):
        build_whole_index(
            "best_fit", np.arange(3), sizes, eligible=eligible, num_samples=1, seq_length=SEQ_LENGTH, seed=0
        )
