"""How the loss is computed without storing the logits of all tokens."""

from collections.abc import Mapping

__all__ = ["BLOCK_NUMBERS", "CHUNK_NUMBERS"]

CHUNK_NUMBERS: Mapping[str, int] = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Device type -> logits per chunk: enough for matrix products at full speed, and few sums of them."""

BLOCK_NUMBERS: Mapping[str, int] = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Device type -> logits of a chunk that are in float32 at a time: fits in a CPU's cache; keeps a GPU busy."""
