"""Encode with gigatoken, which caches words and is many times as fast as the tokenizers library.

It is used only if it gives the same ids. `fast_encoder` checks this before anything is written, on difficult
texts, on the tokenizer's special tokens, and on a sample of the corpus. During the run, a part of each batch
is encoded with both.
"""

import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gigatoken
import numpy as np

from neox_data.errors import TokenizerError
from neox_data.tokenizers.base import Tokenizer
from neox_data.tokenizers.gigatoken_encoding import encode_exactly
from neox_data.tokenizers.huggingface import LibraryBackedTokenizer

__all__ = ["FastEncoder", "fast_encoder"]

# Characters of a batch that are encoded with both.
_CHECKED_CHARACTERS = 500
# gigatoken's cache grows with the corpus; the encoder is recreated after this growth.
_MOST_GROWTH_BYTES = 400 << 20
_MEMORY = Path("/proc/self/statm")

_HARD_TEXTS = (
    "",
    " ",
    "\n\n \t\r\n  x",
    "a  b   c    d\u00a0e\u3000f\u2028g\u200bh",
    "don't I'LL we've  'S it's's 12345 1,234.5e-6 \u0661\u0662 \u00bd\u2167",
    "na\u00efve nai\u0308ve \u212b \ufb01 \uff21\uff42 \u1e9e \u0130\u0131 e\u0301\u0323",
    "\u4f60\u597d\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \uc548\ub155",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u1ea0\u0300",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f680\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea\ufe0f \U0001d54f",
    "\x00\x01\x1f\x7f\x80\x85\ufeff\ufffd\uffff\U0010ffff",
    "def f(x):\n\treturn {'a': [1, 2]}  # !!!???...---___\r\n\r\n\n\n",
    "x" * 3000,
    " " * 700 + "y" + "\n" * 700,
)


class FastEncoder:
    """Encodes texts with gigatoken, and compares its ids with the tokenizer that it replaces.

    Raises:
        TokenizerError: gigatoken does not support this kind of tokenizer.
    """

    def __init__(self, tokenizer: LibraryBackedTokenizer) -> None:
        self._tokenizer = tokenizer
        self._json = tokenizer.description
        self._start()

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated ids of the texts, and the number of ids of each.

        Raises:
            TokenizerError: the ids differ from those of the tokenizers library.
        """
        checked = [texts[len(texts) // 2][:_CHECKED_CHARACTERS]] if texts else []
        self.check(checked, remedy="; pass --exact, which uses the tokenizers library alone")
        result = self._encode(texts)
        if _memory_bytes() > self._memory_bytes + _MOST_GROWTH_BYTES:
            self._start()
        return result

    def check(self, texts: Sequence[str], *, remedy: str = "") -> None:
        """Encode texts with both, and compare.

        Raises:
            TokenizerError: the ids differ.
        """
        ids, sizes = self._encode(texts)
        rows = np.split(ids, np.cumsum(sizes)[:-1]) if len(sizes) else []
        for text, row, expected in zip(texts, rows, self._tokenizer.encode_batch(texts), strict=True):
            if row.tolist() != expected:
                what = f"gigatoken encodes {text[:60]!r} differently from the tokenizers library"
                if not text:
                    what = (
                        "gigatoken does not add the tokens (BOS, EOS) that this tokenizer adds to each text"
                    )
                raise TokenizerError(f"{what}{remedy}", code="encodes-differently")

    def _start(self) -> None:
        try:
            self._encoder = gigatoken.Tokenizer.from_json(self._json)
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise TokenizerError(
                f"gigatoken does not support this tokenizer: {reason}", code="unsupported-by-gigatoken"
            ) from error
        self._memory_bytes = _memory_bytes()

    def _encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and counts; texts with new characters are encoded by the tokenizers library."""
        return encode_exactly(self._encoder, texts, self._tokenizer.encode_batch)


def fast_encoder(tokenizer: Tokenizer, sample: Callable[[], Sequence[str]]) -> FastEncoder:
    """Return an encoder that gives the tokenizer's ids for difficult texts and a sample of the corpus.

    Args:
        tokenizer: the tokenizer to replace.
        sample: returns parts of the corpus.

    Raises:
        TokenizerError: there is no such encoder; the message is the reason.
    """
    if not isinstance(tokenizer, LibraryBackedTokenizer):
        raise TokenizerError(f"{type(tokenizer).__name__} does not belong to the tokenizers library")
    encoder = FastEncoder(tokenizer)
    with ThreadPoolExecutor(1, "start") as executor:
        # The first call of gigatoken prepares its tables, without the interpreter's lock. Meanwhile the hash
        # of the tokenizer is computed, which the manifest needs.
        started = executor.submit(encoder.check, _HARD_TEXTS)
        special = [f"a{text} b {text}{text}\n" for text in tokenizer.added_texts]
        _ = tokenizer.fingerprint
        texts = [*special, *sample()]
        started.result()
    encoder.check(texts)
    return encoder


def _memory_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    if not _MEMORY.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(_MEMORY.read_text().split()[1]) * resource.getpagesize()
