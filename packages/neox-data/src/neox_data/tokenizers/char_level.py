"""A tokenizer with one id per UTF-8 byte, without files, for tests and small experiments."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from neox_data.errors import TokenizerError
from neox_data.tokenizers.base import Tokenizer

__all__ = ["CharLevelTokenizer"]

_NUM_BYTES = 256
# Special tokens among the ids that are no bytes. Encoding does not recognize them in texts.
_SPECIAL = {"<|mask|>": 256, "<|fim_prefix|>": 257, "<|fim_middle|>": 258, "<|fim_suffix|>": 259}
_REPLACEMENT = "\ufffd".encode()


class CharLevelTokenizer(Tokenizer):
    """Encodes text as bytes. As in GPT-NeoX, ids 0 and 1 are also end-of-document and padding.

    Args:
        vocab_file: must be None.
        merge_file: must be None.

    Raises:
        TokenizerError: a file was given.
    """

    # The 256 bytes, four special tokens, and 252 unused ids.
    vocab_size = 512
    # These are also bytes.
    end_of_document = 0
    padding = 1

    def __init__(self, vocab_file: Path | None = None, merge_file: Path | None = None) -> None:
        for file in (vocab_file, merge_file):
            if file is not None:
                raise TokenizerError(f"CharLevelTokenizer uses no files, but {file} was given; remove it")

    @property
    def largest_id(self) -> int:
        """Return the id of the last special token."""
        return max(_SPECIAL.values())

    def token_id(self, token: str) -> int | None:
        """Return the id of a special token or a character of one byte."""
        if token in _SPECIAL:
            return _SPECIAL[token]
        return ord(token) if len(token) == 1 and token.isascii() else None

    def entry(self, number: int) -> str | None:
        """Return the text of a special token."""
        return next((text for text, special in _SPECIAL.items() if special == number), None)

    @property
    def special_ids(self) -> frozenset[int]:
        """Return 0, 1 and the ids that are no bytes."""
        return frozenset((self.end_of_document, self.padding, *range(_NUM_BYTES, self.vocab_size)))

    @property
    def fingerprint(self) -> str:
        """Return a hash of the class name, because all tokenizers of this type are equal."""
        return hashlib.sha256(type(self).__name__.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of a text.

        Raises:
            TokenizerError: the text contains an unpaired surrogate, which cannot be encoded.
        """
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text cannot be encoded as UTF-8: {error}; repair or skip it", code="not-encodable"
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        """Decode bytes to text; ids that are not bytes become U+FFFD."""
        return b"".join(bytes((i,)) if 0 <= i < _NUM_BYTES else _REPLACEMENT for i in ids).decode(
            errors="replace"
        )

    def token_bytes(self) -> Sequence[bytes]:
        """Return the bytes, and U+FFFD for each of the other ids."""
        return [bytes((i,)) for i in range(_NUM_BYTES)] + [_REPLACEMENT] * (self.vocab_size - _NUM_BYTES)
