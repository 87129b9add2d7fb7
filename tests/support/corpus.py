"""A corpus for tests that train: small, and with something to learn."""

from pathlib import Path

import numpy as np

from neox_data.indexed import IndexedDatasetWriter

__all__ = ["write_corpus"]


def write_corpus(folder: Path) -> str:
    """Sixty documents, each a walk through the letters that mostly goes on to the next one.

    Returns:
        The prefix of the .bin and .idx files.
    """
    generator = np.random.default_rng(0)
    prefix = folder / "corpus"
    with IndexedDatasetWriter(prefix, dtype=np.uint16) as writer:
        for _ in range(60):
            steps = generator.choice([1, 1, 1, 5], size=generator.integers(30, 120))
            writer.append((97 + np.cumsum(steps) % 26).astype(np.uint16))
    return str(prefix)
