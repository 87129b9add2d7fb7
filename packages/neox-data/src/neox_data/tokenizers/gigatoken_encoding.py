"""Encode texts with gigatoken as the programs that it replaces do."""

import re
from collections.abc import Callable, Sequence

import gigatoken
import numpy as np

__all__ = ["encode_exactly", "encode_flat"]

# Letters, digits and marks added in Unicode 17. gigatoken 0.10 classifies them as such; tokenizers
# 0.23 and tiktoken 0.14 do not yet, and split words differently next to these characters, and only these.
# First and last character of each range.
_NEW_CHARACTERS = (
    (0x88F, 0x88F), (0xC5C, 0xC5C), (0xCDC, 0xCDC), (0x1ACF, 0x1ADD), (0x1AE0, 0x1AEB), (0xA7CE, 0xA7CF),
    (0xA7D2, 0xA7D2), (0xA7D4, 0xA7D4), (0xA7F1, 0xA7F1), (0x10940, 0x10959), (0x10EC5, 0x10EC7),
    (0x10EFA, 0x10EFB), (0x11B60, 0x11B67), (0x11DB0, 0x11DE9), (0x16EA0, 0x16ED3), (0x16FF2, 0x16FF6),
    (0x187F8, 0x187FF), (0x18D09, 0x18D1E), (0x18D80, 0x18DF2), (0x1E6C0, 0x1E6FF), (0x2B73A, 0x2B73F),
    (0x2CEA2, 0x2CEAD), (0x323B0, 0x33479),
)  # fmt: skip

# They and others in UTF-8, by their first byte; patterns that begin with one byte are fast.
_PERHAPS_NEW = (
    (b"\xe1", re.compile(rb"\xe1[\xab]")),
    (b"\xea", re.compile(rb"\xea[\x9f]")),
    (b"\xf0", re.compile(rb"\xf0[\x90\x91\x96\x98\x9e\xab\xac\xb2\xb3]")),
)
# Those that begin with the byte E0, as most characters of India: single characters are found faster.
_BEHIND_E0 = ("\u088f", "\u0c5c", "\u0cdc")

Flat = tuple[np.ndarray, np.ndarray]


def encode_flat(tokenizer: gigatoken.Tokenizer, texts: Sequence[str]) -> Flat:
    """Return the concatenated ids of texts, and the number of ids of each, int64.

    Raises:
        UnicodeEncodeError: a text contains an unpaired surrogate.
    """
    if not texts:
        return np.empty(0, np.uint32), np.empty(0, np.int64)
    try:
        rows = tokenizer.encode_batch(list(texts)).layout
    except TypeError:
        # gigatoken's message about an unpaired surrogate; this names it.
        "".join(texts).encode()
        raise
    offsets = np.asarray(rows.offsets)
    return np.asarray(rows.content.data)[offsets[0] : offsets[-1]], np.diff(offsets)


def encode_exactly(
    tokenizer: gigatoken.Tokenizer,
    texts: Sequence[str],
    exactly: Callable[[Sequence[str]], Sequence[Sequence[int]]],
) -> Flat:
    """Return the concatenated ids of texts, and the number of ids of each, int64.

    Args:
        tokenizer: encodes texts without new characters.
        texts: the texts.
        exactly: encodes the others, as the program that gigatoken replaces.

    Raises:
        UnicodeEncodeError: a text contains an unpaired surrogate.
    """
    ids, sizes = encode_flat(tokenizer, texts)
    strange = [number for number, text in enumerate(texts) if not text.isascii() and _has_new(text)]
    if not strange:
        return ids, sizes
    rows = np.split(ids, np.cumsum(sizes)[:-1])
    for number, row in zip(strange, exactly([texts[number] for number in strange]), strict=True):
        rows[number] = np.array(row, ids.dtype)
    return np.concatenate(rows), np.fromiter(map(len, rows), np.int64, len(rows))


def _has_new(text: str) -> bool:
    content = text.encode()
    # Most texts lack the first bytes of all of them.
    for first, pattern in _PERHAPS_NEW:
        if first in content and pattern.search(content):
            break
    else:
        return b"\xe0" in content and any(one in text for one in _BEHIND_E0)
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    return any(((begin <= points) & (points <= end)).any() for begin, end in _NEW_CHARACTERS)
