"""Compute the weights of a blend's datasets, and the samples for which each is built."""

import math
from collections.abc import Sequence
from functools import reduce
from operator import add

import numpy as np

from neox_data.errors import DataError
from neox_data.pluralize import pluralize

__all__ = [
    "blend_shares",
    "normalise_weights",
    "plain_sum",
    "relative_weights",
    "samples_per_dataset",
    "weights_by_num_documents",
]

# A dataset of a blend is built this much longer than its share, so that rounding never asks past its end.
_MARGIN = 1.005


def relative_weights(weights: Sequence[float] | None, num_datasets: int) -> np.ndarray:
    """Return the checked weights of a blend, float64, not normalized; None means equal weights.

    Raises:
        DataError: there is not one weight per dataset, a weight is negative or not finite, or the sum is 0 or
            not finite.
    """
    values = np.ones(num_datasets) if weights is None else np.asarray(weights, dtype=np.float64)
    if len(values) != num_datasets:
        found, needed = pluralize(len(values), "weight"), pluralize(num_datasets, "dataset")
        raise DataError(f"{found} for {needed}; give one weight for each path")
    with np.errstate(over="ignore"):
        is_valid = (values >= 0).all() and 0 < values.sum() < math.inf
    if not is_valid:
        raise DataError(
            f"weights {values.tolist()} must be at least 0, one of them above 0, and their sum finite; "
            "correct the list"
        )
    return values


def normalise_weights(weights: Sequence[float] | None, num_datasets: int) -> np.ndarray:
    """Return the weights divided by numpy's sum of them, float64; None means equal weights.

    Raises:
        DataError: see `relative_weights`.
    """
    values = relative_weights(weights, num_datasets)
    return np.asarray(values / values.sum())


def plain_sum(values: Sequence[float]) -> float:
    """Add numbers from left to right, rounding each sum.

    Python's `sum` compensates rounding errors since 3.12, and numpy's adds eight or more in another order.
    """
    return reduce(add, values, 0.0)


def blend_shares(weights: Sequence[float] | None, num_datasets: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the shares for which a blend's datasets are built, and the shares that decide its order.

    The weights are divided by their plain sum, and these shares by numpy's sum of them. The sums can differ
    in the last bit, which decides ties between datasets.

    Raises:
        DataError: see `relative_weights`.

    Source: GPT-NeoX, which divides first where it builds the datasets, then in the blend.
    """
    values = relative_weights(weights, num_datasets)
    built = values / plain_sum(values.tolist())
    return built, np.asarray(built / built.sum())


def weights_by_num_documents(num_documents: Sequence[int], alpha: float) -> np.ndarray:
    """Return weights proportional to each dataset's share of all documents to the power `alpha`.

    1 gives each document the same probability, 0 each dataset; large values select the largest dataset.

    Raises:
        DataError: no dataset has a document, or alpha is below 0 or not finite.

    Source: `weighted_sampler_alpha` in GPT-NeoX's configuration reference (p ~ |L|^alpha, from
        arXiv:1911.02116).
    """
    counts = np.asarray(num_documents, dtype=np.float64)
    if not counts.sum() > 0 or not 0 <= alpha < math.inf:
        raise DataError(
            f"weighted_sampler_alpha {alpha} with {counts.tolist()} documents: alpha must be finite and at "
            "least 0, and there must be documents; correct alpha or the data"
        )
    # Relative to the largest: the power of a share underflows for a large alpha, the power of 1 does not.
    return normalise_weights(((counts / counts.max()) ** alpha * (counts > 0)).tolist(), len(counts))


def samples_per_dataset(num_samples: int, weights: np.ndarray) -> list[int]:
    """Return the number of samples for which each dataset of a blend of `num_samples` is built.

    Args:
        num_samples: number of items of the blend that will be read.
        weights: the first result of `blend_shares`.
    """
    return [math.ceil(num_samples * weight * _MARGIN) for weight in weights.tolist()]
