"""Tokenizers of other programs than the tokenizers library: SentencePiece and tiktoken."""

import hashlib
import re
from abc import abstractmethod
from codecs import register_error
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import gigatoken
import numpy as np
from tokenizers import AddedToken, Regex
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers

from neox_data.errors import TokenizerError
from neox_data.tokenizers.base import Tokenizer, flattened
from neox_data.tokenizers.files import require_files
from neox_data.tokenizers.gigatoken_encoding import encode_exactly, encode_flat
from neox_data.tokenizers.sentencepiece_model import (
    BYTE,
    CONTROL,
    SPACE,
    UNKNOWN,
    UNUSED,
    SentencePieceModel,
)

__all__ = ["RankedFileTokenizer", "SentencePieceTokenizer", "TiktokenTokenizer"]

# The files of tiktoken do not mark special tokens. Source code has `<s>` in several tokens, not in one.
_SPECIAL_FORM = re.compile(r"</?(s|unk|pad|mask)>|<\|[^<>|]+\|>")
_INSTALL = 'pip install "neox-data[sentencepiece]"'


class RankedFileTokenizer(Tokenizer):
    """A tokenizer with one file.

    Args:
        vocab_file: the tokenizer's file.
        merge_file: must be None: vocab_file contains the ranks.

    Raises:
        TokenizerError: a file is missing or unreadable, merge_file is given, or a required token is missing.

    Attributes:
        engine: the program that encodes texts.
    """

    end_text: str
    """The token that ends a document."""
    usual_file: str
    """The name that its file usually has."""

    def __init__(self, vocab_file: Path | None, merge_file: Path | None = None) -> None:
        self.engine = "gigatoken"
        kind = type(self).__name__
        if merge_file is not None:
            raise TokenizerError(f"{kind} has all ranks in vocab_file; remove merge_file {merge_file}")
        (file,) = require_files(kind, {"vocab_file": (vocab_file, self.usual_file)})
        try:
            self._entries = self._load(file)
        except (ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise TokenizerError(f"{kind} cannot read {file}: {reason}; use another file") from error
        self._ids = {entry: number for number, entry in self._entries.items()}
        self.vocab_size = max(self._entries) + 1
        end = self.token_id(self.end_text)
        if end is None:
            raise TokenizerError(
                f"{file} has no end-of-document token {self.end_text!r}; use another tokenizer"
            )
        self.end_of_document = end
        self.padding = self.token_id("<pad>")
        self._fingerprint = hashlib.sha256(kind.encode() + file.read_bytes()).hexdigest()

    @abstractmethod
    def _load(self, path: Path) -> Mapping[int, bytes]:
        """Load the tokenizer of a file, and return the entry of each id.

        Raises:
            ValueError: it is not valid.
            RuntimeError: it is not valid.
        """

    @abstractmethod
    def _encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated ids of the texts, and the number of ids of each."""

    def token_id(self, token: str) -> int | None:
        """Return the id of the token with this text; None if the vocabulary does not contain it."""
        return self._ids.get(token.encode())

    def entry(self, number: int) -> str | None:
        """Return the entry of an id; None if there is none, or it is a part of a character."""
        found = self._entries.get(number, b"").decode(errors="replace")
        return found if found and "\ufffd" not in found else None

    @property
    def special_ids(self) -> frozenset[int]:
        """Return the ids of tokens in the form of special ones, `<pad>` or `<|im_start|>`, and unused ids."""
        return frozenset(
            number
            for number in range(self.vocab_size)
            if number not in self._entries or _SPECIAL_FORM.fullmatch(self.entry(number) or "")
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

        Encodes in threads of the engine.

        Raises:
            TokenizerError: a text contains an unpaired surrogate, which cannot be encoded.
        """
        try:
            return self._encode_flat(texts)
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"a text cannot be encoded as UTF-8: {error}; repair or skip it", code="not-encodable"
            ) from error


class SentencePieceTokenizer(RankedFileTokenizer):
    """A SentencePiece `.model`; documents end with `</s>`.

    Texts are encoded as by the library sentencepiece: control symbols in them are text. BPE models with byte
    fallback, and without rules of normalization and user-defined symbols, are run by gigatoken, others by the
    library.
    """

    end_text = "</s>"
    usual_file = "tokenizer.model"

    def _load(self, path: Path) -> Mapping[int, bytes]:
        content = path.read_bytes()
        self._model = model = SentencePieceModel(content)
        self._library: Any = None
        if model.beyond_gigatoken is None:
            self._gigatoken = gigatoken.Tokenizer.from_json(model.for_gigatoken())
        else:
            self.engine = "sentencepiece"
            self._library = _library(path, content, model.beyond_gigatoken)
        self._texts = [
            bytes([int(piece.text[3:5], 16)])
            if piece.kind == BYTE
            else model.unknown_text.encode()
            if piece.kind == UNKNOWN
            else piece.text.replace(SPACE, " ").encode()
            for piece in model.pieces
        ]
        return {number: piece.text.encode() for number, piece in enumerate(model.pieces)}

    @property
    def special_ids(self) -> frozenset[int]:
        """Return the ids of control symbols, of the unknown piece, of unused ones, and in their form."""
        kinds = (CONTROL, UNKNOWN, UNUSED)
        marked = (number for number, piece in enumerate(self._model.pieces) if piece.kind in kinds)
        return frozenset(marked) | super().special_ids

    def _encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if self._library is None:
            if self._model.removes_spaces:
                texts = [text.lstrip(" ").rstrip(" " + SPACE) for text in texts]
            return encode_flat(self._gigatoken, texts)
        return flattened(self._library.encode([text.encode() for text in texts]))

    def encode_rendered(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of texts in which control symbols are written; the parts between are texts.

        Raises:
            TokenizerError: a text contains an unpaired surrogate, which cannot be encoded.
        """
        rows: list[list[int]] = []
        for text in texts:
            rows.append([])
            for place, part in enumerate(self._control.split(text)):
                rows[-1] += [self._ids[part.encode()]] if place % 2 else self.encode(part)
        return flattened(rows)

    @cached_property
    def _control(self) -> re.Pattern[str]:
        texts = sorted((piece.text for piece in self._model.pieces if piece.kind == CONTROL), key=len)
        # Of none, nothing is found.
        return re.compile(f"({'|'.join(map(re.escape, reversed(texts))) or '(?!)'})")

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids as the library does, with control symbols; ids outside the vocabulary are ignored."""
        pieces, found = self._model.pieces, []
        removes_all = self._model.removes_spaces
        is_beginning = self._model.adds_space or removes_all
        for number in ids:
            if not 0 <= number < self.vocab_size:
                continue
            text, piece = self._texts[number], pieces[number]
            if is_beginning:
                if piece.kind not in (CONTROL, UNKNOWN) and piece.text.startswith(SPACE):
                    text, is_beginning = text[1:], removes_all
                is_beginning = is_beginning and not text
            found.append(text)
        return b"".join(found).decode(errors=_EACH_BYTE)

    def token_bytes(self) -> Sequence[bytes]:
        """Return the bytes of each id."""
        return self._texts


def _library(path: Path, content: bytes, reason: str) -> Any:
    """Return the library's tokenizer.

    Raises:
        TokenizerError: the library is not installed.
    """
    try:
        from sentencepiece import SentencePieceProcessor
    except ModuleNotFoundError as error:
        if error.name != "sentencepiece":
            raise
        raise TokenizerError(
            f"{path} is {reason}, which requires the library sentencepiece; install it with {_INSTALL}",
            code="requires-library",
        ) from error
    return SentencePieceProcessor(model_proto=content)


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    """Return U+FFFD for one byte that is not valid, as SentencePiece does; Python replaces several by one."""
    assert isinstance(error, UnicodeDecodeError), "only decoding uses this"
    return "\ufffd", error.start + 1


_EACH_BYTE = "neox-each-byte"
register_error(_EACH_BYTE, _each_byte)


# How tiktoken 0.14 splits texts into words, by the name of the encoding.
_WORDS = {
    "r50k_base": r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
    "cl100k_base": (
        r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"""
        r"""\s*[\r\n]|\s+(?!\S)|\s"""
    ),
    "o200k_base": (
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"""
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"""
        r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"""
        r"""\s*[\r\n]+|\s+(?!\S)|\s+"""
    ),
}


class TiktokenTokenizer(RankedFileTokenizer):
    """A `.tiktoken` file of an encoding published by OpenAI; documents end with `<|endoftext|>`.

    The file name identifies the encoding (`cl100k_base.tiktoken`), because the file contains neither the
    pretokenization nor the special tokens. Special tokens in a text are recognised.
    """

    end_text = "<|endoftext|>"
    usual_file = "cl100k_base.tiktoken"

    def _load(self, path: Path) -> Mapping[int, bytes]:
        self._words = _WORDS.get(path.stem, "")
        try:
            self._gigatoken = gigatoken.Tokenizer.from_tiktoken(path)
        except ValueError as error:
            # The rest of the message is about function arguments.
            raise ValueError(str(error).partition(". Pass ")[0]) from error
        return self._gigatoken.vocab

    def _encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return encode_exactly(self._gigatoken, texts, self._encoded_by_library)

    def _encoded_by_library(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._library.encode_batch_fast(list(texts))]

    @cached_property
    def _library(self) -> LibraryTokenizer:
        """The same tokenizer in the tokenizers library, which classifies characters as tiktoken does."""
        special = {
            number: self._entries[number].decode() for number in self._entries.keys() & self.special_ids
        }
        spelled = {number: _spelled(entry) for number, entry in self._entries.items()} | special
        merges = [(_spelled(left), _spelled(right)) for left, right in self._gigatoken.merges]
        ids = {text: number for number, text in spelled.items()}
        library = LibraryTokenizer(BPE(ids, merges, ignore_merges=True))
        library.pre_tokenizer = PreTokenizers(
            [Split(Regex(self._words), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        library.add_special_tokens(
            [AddedToken(text, special=True, normalized=False) for text in special.values()]
        )
        return library

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text; ids outside the vocabulary are ignored."""
        known = [number for number in ids if 0 <= number < self.vocab_size]
        return self._gigatoken.decode(known).decode(errors="replace")

    def token_bytes(self) -> Sequence[bytes]:
        """Return the bytes of each id."""
        return [self._entries.get(number, b"") for number in range(self.vocab_size)]


def _spelled(entry: bytes) -> str:
    """Return bytes as the tokenizers library writes them: those that are no visible letters as others."""
    return "".join(_LETTERS[byte] for byte in entry)


_VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_LETTERS = {byte: chr(byte) for byte in _VISIBLE} | {
    byte: chr(256 + place) for place, byte in enumerate(sorted(set(range(256)) - set(_VISIBLE)))
}
