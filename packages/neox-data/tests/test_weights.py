import numpy as np
import pytest

from neox_data.errors import DataError
from neox_data.weights import (
    blend_shares,
    normalise_weights,
    plain_sum,
    samples_per_dataset,
    weights_by_num_documents,
)
from support.refusals import refused


def test_weights_are_normalised() -> None:
    assert normalise_weights([1, 3], 2).tolist() == [0.25, 0.75]
    assert normalise_weights(None, 4).tolist() == [0.25] * 4


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ([1.0], "1 weight for"),
        ([-1.0, 2.0], "at least 0"),
        ([0.0, 0.0], "least 0, one"),
        ([float("nan"), 1.0], "at least 0"),
        ([1e308, 1e308], "at least 0"),
    ],
)
def test_impossible_weights_are_refused(weights: list[float], sentence: str) -> None:
    with refused(DataError, sentence):
        normalise_weights(weights, 2)
    with refused(DataError, sentence):
        blend_shares(weights, 2)


def test_plain_sum_rounds_after_each_addition() -> None:
    assert plain_sum([0.1] * 10) == 0.1 + 0.1 + 0.1 + 0.1 + 0.1 + 0.1 + 0.1 + 0.1 + 0.1 + 0.1 != 1.0
    assert plain_sum([1e16, 1.0, 1.0]) == 1e16


def test_blend_shares_are_divided_by_both_sums() -> None:
    weights = [0.131, 0.295, 0.129, 0.251, 0.005, 0.216, 0.12, 0.15]
    built, shares = blend_shares(weights, 8)
    total = 0.131 + 0.295 + 0.129 + 0.251 + 0.005 + 0.216 + 0.12 + 0.15
    assert built.tolist() == [weight / total for weight in weights]
    assert shares.tolist() == (built / np.sum(built)).tolist()


def test_alpha_1_follows_the_documents_and_0_the_datasets() -> None:
    assert weights_by_num_documents([100, 300], 1).tolist() == [0.25, 0.75]
    assert weights_by_num_documents([100, 300], 0).tolist() == [0.5, 0.5]
    assert weights_by_num_documents([100, 300, 0], 0).tolist() == [0.5, 0.5, 0]


def test_alpha_between_is_the_documented_power() -> None:
    shares = np.array([0.1, 0.9]) ** 0.3
    np.testing.assert_allclose(weights_by_num_documents([10, 90], 0.3), shares / shares.sum(), rtol=1e-15)


def test_a_large_alpha_leaves_the_largest() -> None:
    assert weights_by_num_documents([10, 90], 1e4).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("counts", "alpha"), [([0, 0], 0.3), ([1, 2], -1.0), ([1, 2], float("nan")), ([1, 2], float("inf"))]
)
def test_impossible_counts_are_refused(counts: list[int], alpha: float) -> None:
    with refused(DataError, "weighted_sampler_alpha"):
        weights_by_num_documents(counts, alpha)


def test_each_dataset_is_built_a_little_longer_than_its_share() -> None:
    assert samples_per_dataset(1000, np.array([0.25, 0.75])) == [252, 754]
