"""One id per UTF-8 byte: a tokenizer without files, for tests and small experiments."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from neox_data.errors import TokenizerError
from neox_data.tokenizers.base import Tokenizer

__all__ = ["CharLevelTokenizer"]

_NUM_BYTES = 256
_REPLACEMENT = "\ufffd".encode()


class CharLevelTokenizer(Tokenizer):
    """The bytes of the text. As in GPT-NeoX, ids 0 and 1 also mean end of document and padding.

    Args:
        vocab_file: must be None.
        merge_file: must be None.

    Raises:
        TokenizerError: a file was given.
    """

    def __init__(self, vocab_file: Path | None = None, merge_file: Path | None = None) -> None:
        for file in (vocab_file, merge_file):
            if file is not None:
                raise TokenizerError(f"CharLevelTokenizer reads no file, and {file} was given; leave it out")

    @property
    def vocab_size(self) -> int:
        """512: the bytes, and as many ids that no text gives."""
        return 512

    @property
    def end_of_document(self) -> int:
        """0, which is also the byte 0."""
        return 0

    @property
    def padding(self) -> int:
        """1, which is also the byte 1."""
        return 1

    @property
    def fingerprint(self) -> str:
        """A hash of the name: there is one tokenizer of this kind."""
        return hashlib.sha256(type(self).__name__.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of a text.

        Raises:
            TokenizerError: the text holds half of a surrogate pair, which has no bytes.
        """
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise TokenizerError(f"the text has no UTF-8 form: {error}; repair or skip it") from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of bytes; ids that are no byte become U+FFFD."""
        return b"".join(bytes((i,)) if 0 <= i < _NUM_BYTES else _REPLACEMENT for i in ids).decode(
            errors="replace"
        )

    def token_bytes(self) -> Sequence[bytes]:
        """The bytes, and U+FFFD for each of the other ids."""
        return [bytes((i,)) for i in range(_NUM_BYTES)] + [_REPLACEMENT] * (self.vocab_size - _NUM_BYTES)
