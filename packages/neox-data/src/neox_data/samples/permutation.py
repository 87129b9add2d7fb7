"""A shuffle that nobody has to make: where an item goes is computed, in the same few steps for any length.

Numbers below n are written as pairs (left, right) with left below a and right below b, a * b barely above n.
Each round adds to one half a hash of the other, which subtracting would undo, so the whole is a permutation
of the pairs; pairs that stand for no number below n are sent through once more. A shuffle, no encryption.

Source: John Black and Phillip Rogaway, Ciphers with Arbitrary Finite Domains (CT-RSA 2002), the generalised
Feistel construction; the mixing function is SplitMix64's.
"""

import hashlib
from math import isqrt

__all__ = ["KeyedPermutation"]

_ROUNDS = 8
_WORD = (1 << 64) - 1


class KeyedPermutation:
    """A permutation of 0 to `length` - 1 that depends on a key alone.

    Args:
        length: how many numbers; at least 1.
        key: any text.
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
        """Where an item goes.

        Raises:
            IndexError: there is no such item.
        """
        if not 0 <= item < self._length:
            raise IndexError(f"item {item} of a permutation of {self._length:,}")
        place = self._once(item)
        while place >= self._length:
            place = self._once(place)
        return place

    def index(self, place: int) -> int:
        """The item that goes to a place: the inverse of `permutation[item]`.

        Raises:
            IndexError: there is no such place.
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
