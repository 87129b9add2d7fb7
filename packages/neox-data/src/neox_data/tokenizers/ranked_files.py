"""Tokenizers of files that gigatoken reads and the tokenizers library does not: SentencePiece, tiktoken."""

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

import gigatoken
import numpy as np

from neox_data.errors import TokenizerError
from neox_data.tokenizers.base import Tokenizer

__all__ = ["RankedFileTokenizer", "SentencePieceTokenizer", "TiktokenTokenizer"]


class RankedFileTokenizer(Tokenizer):
    """A tokenizer of one file that gigatoken reads and runs.

    Special tokens written in a text are recognised.

    Args:
        vocab_file: the file.
        merge_file: must be None: ranks are inside.

    Raises:
        TokenizerError: a file is missing, unreadable or too many, or a needed token is not in it.
    """

    end_text: str
    """The token that ends a document."""

    def __init__(self, vocab_file: Path | None, merge_file: Path | None = None) -> None:
        kind = type(self).__name__
        if merge_file is not None:
            raise TokenizerError(f"{kind} has its ranks in one file; leave merge_file {merge_file} out")
        if vocab_file is None or not vocab_file.is_file():
            found = "is not set" if vocab_file is None else f"{vocab_file} does not exist"
            raise TokenizerError(f"{kind} needs vocab_file, which {found}; give the path of its file")
        try:
            self._tokenizer = self._load(vocab_file)
        except (ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise TokenizerError(f"{kind} cannot read {vocab_file}: {reason}; use another file") from error
        self._source = vocab_file
        self._ids = {text: number for number, text in self._tokenizer.vocab.items()}
        self._vocab_size = max(self._ids.values()) + 1
        self._end_of_document = self._needed(self.end_text)
        self._fingerprint = hashlib.sha256(kind.encode() + vocab_file.read_bytes()).hexdigest()

    @abstractmethod
    def _load(self, path: Path) -> gigatoken.Tokenizer:
        """The tokenizer of a file; ValueError or RuntimeError with the reason where it is none."""

    @property
    def vocab_size(self) -> int:
        """Number of ids: one more than the highest."""
        return self._vocab_size

    @property
    def end_of_document(self) -> int:
        """The id of the token that ends a document."""
        return self._end_of_document

    @property
    def padding(self) -> int | None:
        """The id of `<pad>`; None where the vocabulary has none."""
        return self._ids.get(b"<pad>")

    @property
    def fingerprint(self) -> str:
        """A hash of the kind and the file."""
        return self._fingerprint

    def encode(self, text: str) -> list[int]:
        """The ids of a text.

        Raises:
            TokenizerError: the text holds half of a surrogate pair, which has no bytes.
        """
        ids: list[int] = self.encode_flat([text])[0].tolist()
        return ids

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the texts one after another, and how many each has, int64; in gigatoken's threads.

        Raises:
            TokenizerError: a text holds half of a surrogate pair, which has no bytes.
        """
        if not texts:
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        try:
            rows = self._tokenizer.encode_batch(list(texts)).layout
        except UnicodeEncodeError as error:
            raise TokenizerError(f"a text has no UTF-8 form: {error}; repair or skip it") from error
        offsets = np.asarray(rows.offsets)
        return np.asarray(rows.content.data)[offsets[0] : offsets[-1]], np.diff(offsets)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; ids outside of the vocabulary give nothing."""
        known = [number for number in ids if 0 <= number < self.vocab_size]
        return self._tokenizer.decode(known).decode(errors="replace")

    def token_bytes(self) -> Sequence[bytes]:
        """The entries of the file."""
        entries = self._tokenizer.vocab
        return [entries.get(number, b"") for number in range(self._vocab_size)]

    def _needed(self, token: str) -> int:
        number = self._ids.get(token.encode())
        if number is None:
            raise TokenizerError(
                f"{self._source} has no token {token!r}, which ends a document; use another tokenizer"
            )
        return number


class SentencePieceTokenizer(RankedFileTokenizer):
    """A `.model` of SentencePiece, of type BPE with byte fallback; documents end with `</s>`."""

    end_text = "</s>"

    def _load(self, path: Path) -> gigatoken.Tokenizer:
        return gigatoken.Tokenizer.from_sentencepiece(path)


class TiktokenTokenizer(RankedFileTokenizer):
    """A `.tiktoken` file of an encoding that OpenAI publishes; documents end with `<|endoftext|>`.

    The file's name says which (`cl100k_base.tiktoken`): how text is cut and which tokens are special is not
    in the file.
    """

    end_text = "<|endoftext|>"

    def _load(self, path: Path) -> gigatoken.Tokenizer:
        try:
            return gigatoken.Tokenizer.from_tiktoken(path)
        except ValueError as error:
            # What follows tells a programmer what to call.
            raise ValueError(str(error).partition(". Pass ")[0]) from error
