"""Tokenizers that gigatoken supports and the tokenizers library does not: SentencePiece and tiktoken."""

import hashlib
import re
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

import gigatoken
import numpy as np

from neox_data.errors import TokenizerError
from neox_data.tokenizers.base import Tokenizer
from neox_data.tokenizers.files import require_files
from neox_data.tokenizers.huggingface import is_tokenizer_json

__all__ = ["RankedFileTokenizer", "SentencePieceTokenizer", "TiktokenTokenizer"]

# The files do not mark special tokens. Source code has `<s>` in several tokens, not in one.
_SPECIAL_FORM = re.compile(rb"</?(s|unk|pad|mask)>|<\|[^<>|]+\|>")


class RankedFileTokenizer(Tokenizer):
    """A tokenizer with one file, run by gigatoken.

    Special tokens in a text are recognised.

    Args:
        vocab_file: the tokenizer's file.
        merge_file: must be None: vocab_file contains the ranks.

    Raises:
        TokenizerError: a file is missing or unreadable, merge_file is given, or a required token is missing.
    """

    end_text: str
    """The token that ends a document."""
    usual_file: str
    """The name that its file usually has."""

    def __init__(self, vocab_file: Path | None, merge_file: Path | None = None) -> None:
        kind = type(self).__name__
        if merge_file is not None:
            raise TokenizerError(f"{kind} has all ranks in vocab_file; remove merge_file {merge_file}")
        (file,) = require_files(kind, {"vocab_file": (vocab_file, self.usual_file)})
        if is_tokenizer_json(file):
            raise TokenizerError(
                f"{file} is a tokenizer.json, which {kind} does not read; set tokenizer_type to HFTokenizer"
            )
        try:
            self._tokenizer = self._load(file)
        except (ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise TokenizerError(f"{kind} cannot read {file}: {reason}; use another file") from error
        self._source = file
        self._ids = {text: number for number, text in self._tokenizer.vocab.items()}
        self._vocab_size = max(self._ids.values()) + 1
        self._end_of_document = self._needed(self.end_text)
        self._fingerprint = hashlib.sha256(kind.encode() + file.read_bytes()).hexdigest()

    @abstractmethod
    def _load(self, path: Path) -> gigatoken.Tokenizer:
        """Load the tokenizer of a file; raise ValueError or RuntimeError if it is not valid."""

    @property
    def vocab_size(self) -> int:
        """Return the number of ids: the highest id plus one."""
        return self._vocab_size

    @property
    def end_of_document(self) -> int:
        """Return the id of the end-of-document token."""
        return self._end_of_document

    @property
    def padding(self) -> int | None:
        """Return the id of `<pad>`; None if it is not in the vocabulary."""
        return self._ids.get(b"<pad>")

    def token_id(self, token: str) -> int | None:
        """Return the id of the token with this text; None if the vocabulary does not contain it."""
        return self._ids.get(token.encode())

    @property
    def special_ids(self) -> frozenset[int]:
        """Return the ids of tokens in the form of special ones, `<pad>` or `<|im_start|>`, and unused ids."""
        texts = {number: text for text, number in self._ids.items()}
        return frozenset(
            number
            for number in range(self._vocab_size)
            if number not in texts or _SPECIAL_FORM.fullmatch(texts[number])
        )

    @property
    def fingerprint(self) -> str:
        """Return a hash of the tokenizer type and the file."""
        return self._fingerprint

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text.

        Raises:
            TokenizerError: the text contains an unpaired surrogate, which cannot be encoded.
        """
        ids: list[int] = self.encode_flat([text])[0].tolist()
        return ids

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated ids of the texts, and the number of ids of each, int64.

        Encodes in gigatoken's threads.

        Raises:
            TokenizerError: a text contains an unpaired surrogate, which cannot be encoded.
        """
        if not texts:
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        try:
            rows = self._tokenizer.encode_batch(list(texts)).layout
        except UnicodeEncodeError as error:
            raise TokenizerError(f"a text cannot be encoded as UTF-8: {error}; repair or skip it") from error
        offsets = np.asarray(rows.offsets)
        return np.asarray(rows.content.data)[offsets[0] : offsets[-1]], np.diff(offsets)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text; ids outside the vocabulary are ignored."""
        known = [number for number in ids if 0 <= number < self.vocab_size]
        return self._tokenizer.decode(known).decode(errors="replace")

    def token_bytes(self) -> Sequence[bytes]:
        """Return the bytes of each id."""
        entries = self._tokenizer.vocab
        return [entries.get(number, b"") for number in range(self._vocab_size)]

    def _needed(self, token: str) -> int:
        number = self._ids.get(token.encode())
        if number is None:
            raise TokenizerError(
                f"{self._source} has no end-of-document token {token!r}; use another tokenizer"
            )
        return number


class SentencePieceTokenizer(RankedFileTokenizer):
    """A SentencePiece `.model` of type BPE with byte fallback; documents end with `</s>`."""

    end_text = "</s>"
    usual_file = "tokenizer.model"

    def _load(self, path: Path) -> gigatoken.Tokenizer:
        return gigatoken.Tokenizer.from_sentencepiece(path)


class TiktokenTokenizer(RankedFileTokenizer):
    """A `.tiktoken` file of an encoding published by OpenAI; documents end with `<|endoftext|>`.

    The file name identifies the encoding (`cl100k_base.tiktoken`), because the file contains neither the
    pretokenization nor the special tokens.
    """

    end_text = "<|endoftext|>"
    usual_file = "cl100k_base.tiktoken"

    def _load(self, path: Path) -> gigatoken.Tokenizer:
        try:
            return gigatoken.Tokenizer.from_tiktoken(path)
        except ValueError as error:
            # The rest of the message is about function arguments.
            raise ValueError(str(error).partition(". Pass ")[0]) from error
