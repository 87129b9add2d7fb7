"""Fingerprint of the samples of a dataset and their order, stored next to the analysis of their difficulty.

An analysis lists samples by number. With another seed, sample order or data, the same numbers are other
samples, and a curriculum would be a random order.
"""

import hashlib
import json
import logging
from pathlib import Path

import numpy as np

from neox_data.blend import SampleDataset
from neox_data.errors import DataError
from neox_data.whole_files import written_aside

__all__ = ["check_order", "fingerprint_order", "order_path", "record_order"]

logger = logging.getLogger(__name__)

_COMPARED = 1024
_KEY = "sample_order_sha256"


def fingerprint_order(dataset: SampleDataset) -> str:
    """Return a hash of the lengths and weights of the datasets, and of the tokens of 1,024 spaced samples."""
    lengths = [len(source) for source in getattr(dataset, "datasets", [dataset])]
    digest = hashlib.sha256(json.dumps(lengths, allow_nan=False).encode())
    weights = getattr(dataset, "weights", None)
    if weights is not None:
        digest.update(np.ascontiguousarray(weights, "<f8").tobytes())
    count = min(len(dataset), _COMPARED)
    for number in range(count):
        item = number * (len(dataset) - 1) // max(count - 1, 1)
        digest.update(np.ascontiguousarray(dataset[item], "<i8").tobytes())
    return digest.hexdigest()


def order_path(prefix: Path | str) -> Path:
    """Return the file with the fingerprint of the order for which an analysis file was made."""
    return Path(f"{prefix}.order.json")


def record_order(prefix: Path | str, fingerprint: str) -> None:
    """Write the fingerprint next to an analysis file."""
    with written_aside(order_path(prefix)) as file:
        file.write(json.dumps({_KEY: fingerprint}, allow_nan=False).encode() + b"\n")


def check_order(prefix: Path | str, fingerprint: str) -> None:
    """Compare the fingerprint next to an analysis file; log a warning if there is none.

    Raises:
        DataError: the analysis was made for other samples, or the fingerprint is damaged.
    """
    path = order_path(prefix)
    if not path.exists():
        logger.warning(
            "%s does not exist, so it is not known whether the analysis is of these samples in this order; "
            "neox-data analyze writes it",
            path,
        )
        return
    try:
        recorded = json.loads(path.read_bytes())[_KEY]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error!r}); run neox-data analyze again") from error
    if recorded != fingerprint:
        raise DataError(
            f"the analysis {prefix} was made with another seed, sample_order, seq_length, train_iters or "
            "data, so its sample numbers are other samples now; run neox-data analyze again with this "
            "configuration",
            code="other-order",
        )
