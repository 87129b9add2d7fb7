"""Texts on which both sides are compared: sources of Python's standard library, and invented ones."""

import argparse
import inspect
import random
import statistics
import typing
from functools import cache

__all__ = ["many_texts", "real_text"]

_PIECE = 200
# First and last character of scripts whose pretokenization differs.
_SCRIPTS = (
    *((0x20, 0x7E), (0xA0, 0x17F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x5FF), (0x600, 0x6FF)),
    *((0x900, 0x97F), (0xE00, 0xE7F), (0x1E00, 0x1EFF), (0x2000, 0x206F), (0x3040, 0x30FF), (0x4E00, 0x9FFF)),
    *((0xAC00, 0xD7A3), (0x1F300, 0x1F64F), (0x0, 0x1F)),
)


@cache
def real_text() -> str:
    """Return a long text: sources of Python's standard library."""
    return "".join(map(inspect.getsource, (argparse, typing, inspect, statistics)))


def many_texts(count: int, special: list[str]) -> list[str]:
    """Return different texts: half of them real, the others of characters of all scripts.

    Args:
        count: number of texts.
        special: texts of special tokens, each of which is put into some of the texts.
    """
    source, text = random.Random(0), real_text()
    found = ["", " ", "\n\n", "  a  b\t\tc\r\n", "don't I'LL 12345 1,234.5e-6"]
    found += [f"a{token} b {token}{token}\n" for token in special[: count // 10]]
    while len(found) < count:
        if len(found) % 2:
            start = source.randrange(len(text) - _PIECE)
            found.append(text[start : start + source.randrange(1, _PIECE)])
        else:
            first, last = source.choice(_SCRIPTS)
            length = source.randrange(1, 40)
            found.append("".join(chr(source.randint(first, last)) for _ in range(length)))
    return found[:count]
