"""Documents whose middle is moved behind their end: against the definition, and as items of a dataset."""

import numpy as np
import pytest

from neox_data.fill_in_middle import FillInMiddleDataset, MiddleTokens, fill_in_middle
from neox_data.random_draws import RandomDraws
from neox_data.samples.whole_documents import IGNORED

END, PRE, MID, SUF = 0, 900, 901, 902
SPECIAL = MiddleTokens(prefix=PRE, middle=MID, suffix=SUF, end_of_document=END)


class Items:
    """Items of the same documents, with labels or without."""

    def __init__(self, *items: list[int], padded_to: int | None = None) -> None:
        self.items, self.padded_to = items, padded_to

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, item: int) -> np.ndarray:
        tokens = np.array(self.items[item], np.int64)
        if self.padded_to is None:
            return tokens
        padding = self.padded_to - len(tokens)
        return np.stack([np.pad(tokens, (0, padding)), np.pad(tokens, (0, padding), constant_values=IGNORED)])


def restored(tokens: list[int]) -> tuple[list[int], str]:
    """The document that a rearranged one was, and its order, read token by token."""
    assert tokens[0] == PRE
    suffix, middle = tokens.index(SUF), tokens.index(MID)
    if suffix == 1:
        # <prefix> <suffix> suffix <middle> prefix middle
        return tokens[middle + 1 :] + tokens[2:middle], "SPM"
    return tokens[1:suffix] + tokens[middle + 1 :] + tokens[suffix + 1 : middle], "PSM"


def documents_of(tokens: np.ndarray) -> list[list[int]]:
    ends = np.flatnonzero(tokens == END)
    return [part[part != END].tolist() for part in np.split(tokens, ends + 1)]


def test_every_document_is_rearranged_and_can_be_restored() -> None:
    documents = [list(range(first, first + size)) for first, size in ((1, 3), (10, 40), (100, 7), (200, 9))]
    tokens = np.array([token for row in documents[:3] for token in (*row, END)] + documents[3])
    orders = set()
    for number in range(50):
        found = fill_in_middle(tokens, SPECIAL, RandomDraws(f"{number}"), rate=1.0, spm_rate=0.5)
        assert len(found) == len(tokens) + 3 * 4
        parts = documents_of(found)
        assert len(parts) == 4
        for part, document in zip(parts, documents, strict=True):
            original, order = restored(part)
            assert original == document
            orders.add(order)
    assert orders == {"PSM", "SPM"}


@pytest.mark.parametrize(("spm_rate", "order"), [(0.0, "PSM"), (1.0, "SPM")])
def test_the_order_is_chosen_by_its_rate(spm_rate: float, order: str) -> None:
    tokens = np.arange(1, 30)
    for number in range(20):
        found = fill_in_middle(tokens, SPECIAL, RandomDraws(f"{number}"), rate=1.0, spm_rate=spm_rate)
        body = found.tolist()
        # An empty prefix looks like SPM.
        assert body[1] == SUF if order == "SPM" else body.index(SUF) < body.index(MID)
        assert sorted(body) == sorted([*tokens.tolist(), PRE, MID, SUF])


def test_the_share_of_documents_and_the_cuts_have_their_distributions() -> None:
    size, count = 20, 6_000
    tokens = np.array([*range(1, size + 1), END] * count)
    found = documents_of(fill_in_middle(tokens, SPECIAL, RandomDraws("x"), rate=0.3, spm_rate=0.25))[:-1]
    changed = [part for part in found if PRE in part]
    assert len(found) == count
    # Five standard deviations of a binomial distribution.
    assert abs(len(changed) / count - 0.3) < 5 * (0.3 * 0.7 / count) ** 0.5
    is_spm = [part[1] == SUF and part.index(MID) != 2 for part in changed]
    # PSM with an empty prefix is counted as SPM: a cut at 0, of 21 places, in one of both cuts.
    empty = 1 - (20 / 21) ** 2
    expected = 0.25 + 0.75 * empty
    assert abs(np.mean(is_spm) - expected) < 0.06
    lengths = [size - (part.index(MID) - part.index(SUF) - 1) for part in changed if part[1] != SUF]
    # The larger of two cuts, given that the smaller one is not 0: the mean of 1 to 20, twice.
    assert abs(np.mean(lengths) - (2 / 3 * size + 0.68)) < 0.5


def test_short_documents_and_other_samples_stay_as_they_are() -> None:
    tokens = np.array([1, 2, END, 5, 6, END, END])
    assert (
        fill_in_middle(tokens, SPECIAL, RandomDraws("x"), rate=1.0, spm_rate=0.5).tolist() == tokens.tolist()
    )
    long = np.arange(1, 50)
    assert fill_in_middle(long, SPECIAL, RandomDraws("x"), rate=0.0, spm_rate=0.5).tolist() == long.tolist()


def dataset(items: Items, **changes) -> FillInMiddleDataset:
    return FillInMiddleDataset(items, SPECIAL, **{"seed": 3, "rate": 1.0, "spm_rate": 0.5} | changes)


def test_an_item_keeps_its_length_and_depends_on_seed_and_number_alone() -> None:
    row = list(range(1, 60))
    items = Items(row, row)
    found = [dataset(items)[item].tolist() for item in (0, 1)]
    assert [len(one) for one in found] == [59, 59]
    assert found[0] != found[1]
    assert found == [dataset(items)[item].tolist() for item in (0, 1)]
    assert dataset(items, seed=4)[0].tolist() != found[0]
    assert dataset(items, rate=0.0)[0].tolist() == row


def test_padding_stays_behind_the_documents_and_has_no_label() -> None:
    row = [1, 2, 3, 4, 5, END]
    tokens, labels = dataset(Items(row, padded_to=12))[0]
    assert restored(tokens[:8].tolist())[0] == row[:5]
    assert tokens[8:].tolist() == [END, 0, 0, 0]
    assert labels.tolist() == [*tokens[:9].tolist(), *[IGNORED] * 3]
    # Without room for three more tokens, the end of the document is left out.
    tokens, labels = dataset(Items(row, padded_to=7))[0]
    assert labels.tolist() == tokens.tolist()


def test_the_numbers_are_those_of_every_version() -> None:
    """Written down, so that another numpy or another way to make them changes no resumed run."""
    assert RandomDraws("3 fill-in-middle 0").uniform(2, 2).tolist() == [
        [0.18126511256486144, 0.9168194173608328],
        [0.7890472945926033, 0.7176122791707255],
    ]
