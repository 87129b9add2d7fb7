"""Random numbers of a sample, which depend on a key alone: the same on every rank, machine and version.

Only the raw integers of numpy's Philox generator are used, which are the same in every version of numpy; the
methods of its Generator may change.
"""

import hashlib

import numpy as np
from numpy.random import Philox

__all__ = ["RandomDraws"]


class RandomDraws:
    """A stream of random numbers."""

    def __init__(self, key: str) -> None:
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        self._source = Philox(key=int.from_bytes(digest, "little"))

    def uniform(self, *shape: int) -> np.ndarray:
        """Return the next numbers, float64 from 0 to below 1, multiples of 2**-53."""
        count = int(np.prod(shape, dtype=np.int64))
        raw = np.asarray(self._source.random_raw(count), dtype=np.uint64) >> np.uint64(11)
        return (raw * 2.0**-53).reshape(shape)
