"""What generation hangs into a layer that looks at earlier tokens."""

from typing import Protocol

from torch import Tensor

__all__ = ["Cache"]


class Cache(Protocol):
    """Rows of one layer, one per token seen so far (see attention.kv_cache).

    Attributes:
        length: tokens seen before this call.
    """

    length: int

    def extend(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Append to each kind of row, and give all rows so far."""
