"""What a SentencePiece `.model` contains: a protocol buffer with pieces, and how texts are normalized."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson

__all__ = ["BYTE", "CONTROL", "SPACE", "UNKNOWN", "UNUSED", "Piece", "SentencePieceModel"]

SPACE = "\u2581"
"""How SentencePiece writes spaces."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_KINDS_OF_MODELS = {1: "a unigram model", 2: "a BPE model", 3: "a model of words", 4: "a model of characters"}
_UNIGRAM, _BPE = 1, 2

# Types of fields.
_WHOLE, _BYTES = 0, 2
# Numbers of fields in sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER, _DENORMALIZER = 1, 2, 3, 5
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL_TYPE, _SPACE_BEHIND, _BYTE_FALLBACK, _UNKNOWN_TEXT = 3, 24, 35, 44
_RULES, _ADDS_SPACE, _REMOVES_SPACES, _ESCAPES_SPACES = 2, 3, 4, 5


@dataclass(frozen=True, slots=True)
class Piece:
    """An entry of the vocabulary.

    Attributes:
        text: how the file writes it, with U+2581 for spaces.
        score: its rank among merges, or its log-probability.
        kind: NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED or BYTE.
    """

    text: str
    score: float
    kind: int


class SentencePieceModel:
    """The content of a `.model`.

    Raises:
        ValueError: they are not a SentencePiece model.
    """

    def __init__(self, content: bytes) -> None:
        try:
            fields = list(_fields(content))
            training, normalizing, denormalizing = (
                dict(_fields(b"".join(value for field, value in fields if field == number)))
                for number in (_TRAINER, _NORMALIZER, _DENORMALIZER)
            )
            self.pieces: Sequence[Piece] = [_piece(value) for field, value in fields if field == _PIECES]
            self.unknown_text: str = training.get(_UNKNOWN_TEXT, " \u2047 ".encode()).decode()
        except (IndexError, TypeError, AttributeError, UnicodeDecodeError, struct.error) as error:
            raise ValueError("not a sentencepiece model") from error
        if not self.pieces:
            raise ValueError("not a sentencepiece model: no pieces found")
        if denormalizing.get(_RULES):
            raise ValueError("rules that change decoded texts are not implemented")
        self._training = training
        self._rules = normalizing.get(_RULES, b"")
        self._escapes_spaces = bool(normalizing.get(_ESCAPES_SPACES, 1))
        self.adds_space = bool(normalizing.get(_ADDS_SPACE, 1))
        self.removes_spaces = bool(normalizing.get(_REMOVES_SPACES, 1))

    @cached_property
    def beyond_gigatoken(self) -> str | None:
        """What gigatoken encodes otherwise than SentencePiece, or not at all, in words; None: nothing."""
        kinds = {piece.kind for piece in self.pieces}
        bytes_ = {piece.text for piece in self.pieces if piece.kind == BYTE}
        kind = self._training.get(_MODEL_TYPE, _UNIGRAM)
        cases = (
            (kind != _BPE, _KINDS_OF_MODELS.get(kind, f"a model of type {kind}")),
            (bool(self._rules), "a model that normalizes texts"),
            (USER_DEFINED in kinds, "a model with user-defined symbols"),
            (UNUSED in kinds, "a model with unused pieces"),
            (len(bytes_) != 256 or not self._training.get(_BYTE_FALLBACK), "a model without byte fallback"),
            (not self._escapes_spaces, "a model that does not escape spaces"),
            (bool(self._training.get(_SPACE_BEHIND)), "a model with spaces behind words"),
        )
        return next((words for applies, words in cases if applies), None)

    def for_gigatoken(self) -> bytes:
        """Return the model as a tokenizer.json, for texts without the spaces that it removes at their ends.

        Only normal pieces are made of text: nothing merges to a control symbol, nor is one recognized.
        """
        ids = {piece.text: number for number, piece in enumerate(self.pieces)}
        normal = {piece.text: piece.score for piece in self.pieces if piece.kind == NORMAL}
        merges = [
            (score, text[:cut], text[cut:])
            for text, score in normal.items()
            for cut in range(1, len(text))
            if text[:cut] in normal and text[cut:] in normal
        ]
        # As in SentencePiece, pairs are merged by the score of what they make.
        merges.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
        several = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
        normalizers = [
            *([several] if self.removes_spaces else []),
            *([{"type": "Prepend", "prepend": SPACE}] if self.adds_space else []),
            {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        ]
        unknown = next((piece.text for piece in self.pieces if piece.kind == UNKNOWN), None)
        model = {
            "type": "BPE",
            "vocab": ids,
            "merges": [[left, right] for _, left, right in merges],
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
        }
        normalizer = {"type": "Sequence", "normalizers": normalizers}
        return orjson.dumps({"version": "1.0", "added_tokens": [], "normalizer": normalizer, "model": model})


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a message: whole numbers, or bytes."""
    place = 0
    while place < len(content):
        key, place = _number(content, place)
        width = {1: 8, 5: 4}.get(key & 7)
        value: int | bytes
        if key & 7 == _WHOLE:
            value, place = _number(content, place)
        else:
            if key & 7 == _BYTES:
                width, place = _number(content, place)
            if width is None or place + width > len(content):
                raise IndexError(place)
            value, place = content[place : place + width], place + width
        yield key >> 3, value


def _number(content: bytes, place: int) -> tuple[int, int]:
    """Return the whole number at a place, and the place behind it."""
    value = shift = 0
    while True:
        byte = content[place]
        value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
        if byte < 128:
            return value, place


def _piece(content: bytes) -> Piece:
    fields = dict(_fields(content))
    (score,) = struct.unpack("<f", fields.get(_SCORE, bytes(4)))
    return Piece(fields.get(_TEXT, b"").decode(), score, fields.get(_KIND, NORMAL))
