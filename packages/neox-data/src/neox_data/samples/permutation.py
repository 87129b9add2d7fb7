"""A permutation computed item by item, in constant time and without an index.

Numbers below n are written as pairs (left, right) with left < a and right < b, a * b slightly above n. Each
round adds a hash of one half to the other, which is invertible, so the result is a permutation of the pairs.
Results of n or more are permuted again. This is a shuffle, not encryption.

Source: John Black and Phillip Rogaway, Ciphers with Arbitrary Finite Domains (CT-RSA 2002), the generalised
Feistel construction; the mixing function is SplitMix64's.
"""

import hashlib
from math import isqrt

__all__ = ["KeyedPermutation"]

_ROUNDS = 8
_WORD = (1 << 64) - 1


class KeyedPermutation:
    """A permutation of 0 to `length` - 1, determined by a key.

    Args:
        length: number of items; at least 1.
        key: any string.
    """

    def __init__(self, length: int, key: str) -> None:
        self._length = length
        self._left = isqrt(length - 1) + 1 if length > 1 else 1
        self._right = -(-length // self._left)
        digest = hashlib.shake_256(key.encode()).digest(8 * _ROUNDS)
        self._keys = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8)]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, item: int) -> int:
        """Return the position of an item.

        Raises:
            IndexError: the item does not exist.
        """
        if not 0 <= item < self._length:
            raise IndexError(f"item {item} of a permutation of {self._length:,}")
        place = self._once(item)
        while place >= self._length:
            place = self._once(place)
        return place

    def index(self, place: int) -> int:
        """Return the item at a position: the inverse of `permutation[item]`.

        Raises:
            IndexError: the position does not exist.
        """
        if not 0 <= place < self._length:
            raise IndexError(f"place {place} of a permutation of {self._length:,}")
        item = self._back(place)
        while item >= self._length:
            item = self._back(item)
        return item

    def _once(self, number: int) -> int:
        left, right = divmod(number, self._right)
        for turn in range(0, _ROUNDS, 2):
            left = (left + _mix(right ^ self._keys[turn])) % self._left
            right = (right + _mix(left ^ self._keys[turn + 1])) % self._right
        return left * self._right + right

    def _back(self, number: int) -> int:
        left, right = divmod(number, self._right)
        for turn in range(_ROUNDS - 2, -1, -2):
            right = (right - _mix(left ^ self._keys[turn + 1])) % self._right
            left = (left - _mix(right ^ self._keys[turn])) % self._left
        return left * self._right + right


def _mix(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
