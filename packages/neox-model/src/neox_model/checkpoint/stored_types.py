"""Facts about the dtypes of stored tensors, by the names of the safetensors format, without torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["STORED_TYPES", "StoredType"]


@dataclass(frozen=True, slots=True)
class StoredType:
    """One dtype: the bytes of an element, and the smallest and largest number.

    Args:
        itemsize: bytes of an element.
        smallest: most negative finite number.
        largest: largest finite number.
        is_floating_point: whether it has fractions, infinities and NaN.
    """

    itemsize: int
    smallest: float
    largest: float
    is_floating_point: bool

    def holds(self, value: float) -> bool:
        """Return whether a number can be stored: it is in range, or not finite if the dtype has such."""
        if not math.isfinite(value):
            return self.is_floating_point
        return self.smallest <= value <= self.largest


def _floating(itemsize: int, largest: float) -> StoredType:
    return StoredType(itemsize, -largest, largest, is_floating_point=True)


def _signed(itemsize: int) -> StoredType:
    half = 2 ** (8 * itemsize - 1)
    return StoredType(itemsize, -half, half - 1, is_floating_point=False)


STORED_TYPES: Mapping[str, StoredType] = {
    "F64": _floating(8, (2 - 2.0**-52) * 2.0**1023),
    "F32": _floating(4, (2 - 2.0**-23) * 2.0**127),
    "F16": _floating(2, (2 - 2.0**-10) * 2.0**15),
    "BF16": _floating(2, (2 - 2.0**-7) * 2.0**127),
    "I64": _signed(8),
    "I32": _signed(4),
    "I16": _signed(2),
    "I8": _signed(1),
    "U8": StoredType(1, 0, 255, is_floating_point=False),
    "BOOL": StoredType(1, 0, 1, is_floating_point=False),
}
