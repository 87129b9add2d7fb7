"""The interface of caches that generation adds to layers."""

from typing import Protocol

from torch import Tensor

__all__ = ["Cache"]


class Cache(Protocol):
    """Cached rows of one layer, one per earlier token (see attention.kv_cache).

    Attributes:
        length: number of cached tokens.
    """

    length: int

    def extend(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Append rows to each cached tensor, and return all rows."""
