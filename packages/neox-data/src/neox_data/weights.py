"""How much of each dataset a blend takes: normalised weights, weights from document counts, sample counts."""

import math
from collections.abc import Sequence

import numpy as np

from neox_data.errors import DataError

__all__ = ["normalise_weights", "samples_per_dataset", "weights_by_num_documents"]

# A dataset of a blend is built this much longer than its share, so that rounding never asks past its end.
_MARGIN = 1.005


def normalise_weights(weights: Sequence[float] | None, num_datasets: int) -> np.ndarray:
    """Weights that sum to 1, float64; None means equal ones.

    Raises:
        DataError: not one weight per dataset, a weight below 0 or not a number, or all 0.
    """
    values = np.ones(num_datasets) if weights is None else np.asarray(weights, dtype=np.float64)
    if len(values) != num_datasets:
        raise DataError(f"{len(values)} weights for {num_datasets} datasets; give one weight for each path")
    if not (np.isfinite(values).all() and (values >= 0).all() and values.sum() > 0):
        raise DataError(
            f"weights {values.tolist()} must be at least 0, and one of them above; correct the list"
        )
    return np.asarray(values / values.sum())


def weights_by_num_documents(num_documents: Sequence[int], alpha: float) -> np.ndarray:
    """Weights proportional to each dataset's share of all documents, to the power `alpha`.

    1 gives each document the same chance, 0 each dataset; a large value leaves the largest dataset alone.

    Raises:
        DataError: no dataset has a document, or alpha is below 0.

    Source: `weighted_sampler_alpha` in GPT-NeoX's configuration reference (p ~ |L|^alpha, from
        arXiv:1911.02116).
    """
    counts = np.asarray(num_documents, dtype=np.float64)
    if not counts.sum() > 0 or not alpha >= 0:
        raise DataError(
            f"weighted_sampler_alpha {alpha} with documents {counts.tolist()}: needs an alpha of at least 0 "
            "and "
            f"some documents"
        )
    # Relative to the largest: the power of a share underflows for a large alpha, the power of 1 does not.
    return normalise_weights(((counts / counts.max()) ** alpha * (counts > 0)).tolist(), len(counts))


def samples_per_dataset(num_samples: int, weights: np.ndarray) -> list[int]:
    """How many samples each dataset of a blend of `num_samples` is built for."""
    return [math.ceil(num_samples * weight * _MARGIN) for weight in weights.tolist()]
