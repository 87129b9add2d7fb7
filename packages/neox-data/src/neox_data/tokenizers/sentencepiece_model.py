"""What a SentencePiece `.model` contains: a protocol buffer with pieces, and how texts are normalized."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

__all__ = ["BYTE", "CONTROL", "UNKNOWN", "UNUSED", "Piece", "SentencePieceModel"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_KINDS_OF_MODELS = {1: "a unigram model", 2: "a BPE model", 3: "a model of words", 4: "a model of characters"}
_UNIGRAM, _BPE = 1, 2

# Types of fields.
_WHOLE, _BYTES = 0, 2
# Numbers of fields in sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER, _DENORMALIZER = 1, 2, 3, 5
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL_TYPE, _SPACE_BEHIND, _BYTE_FALLBACK, _UNKNOWN_TEXT, _UNKNOWN_PIECE = 3, 24, 35, 44, 45
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

    Args:
        content: the bytes of the file.

    Raises:
        ValueError: they are not a SentencePiece model.
    """

    def __init__(self, content: bytes) -> None:
        try:
            fields = list(_fields(content))
            self._trainer, self._normalizer, denormalizer = (
                b"".join(value for field, value in fields if field == number)
                for number in (_TRAINER, _NORMALIZER, _DENORMALIZER)
            )
            self.pieces: Sequence[Piece] = [_piece(value) for field, value in fields if field == _PIECES]
            self._training, normalizing = dict(_fields(self._trainer)), dict(_fields(self._normalizer))
            is_denormalized = bool(dict(_fields(denormalizer)).get(_RULES))
            self.unknown_text: str = self._training.get(_UNKNOWN_TEXT, " \u2047 ".encode()).decode()
        except (IndexError, TypeError, AttributeError, UnicodeDecodeError, struct.error) as error:
            raise ValueError("not a sentencepiece model") from error
        if not self.pieces:
            raise ValueError("not a sentencepiece model: no pieces found")
        if is_denormalized:
            raise ValueError("rules that change decoded texts are not implemented")
        self._rules = normalizing.get(_RULES, b"")
        self._escapes_spaces = bool(normalizing.get(_ESCAPES_SPACES, 1))
        self.adds_space = bool(normalizing.get(_ADDS_SPACE, 1))
        self.removes_spaces = bool(normalizing.get(_REMOVES_SPACES, 1))

    @cached_property
    def beyond_gigatoken(self) -> str | None:
        """What gigatoken encodes otherwise than SentencePiece, or not at all, in words; None: nothing."""
        kinds = {piece.kind for piece in self.pieces}
        bytes_ = {piece.text for piece in self.pieces if piece.kind == BYTE}
        normal = {piece.text for piece in self.pieces if piece.kind == NORMAL}
        kind = self._training.get(_MODEL_TYPE, _UNIGRAM)
        cases = (
            (kind != _BPE, _KINDS_OF_MODELS.get(kind, f"a model of type {kind}")),
            (bool(self._rules), "a model that normalizes texts"),
            (USER_DEFINED in kinds, "a model with user-defined symbols"),
            (UNUSED in kinds, "a model with unused pieces"),
            (len(bytes_) != 256 or not self._training.get(_BYTE_FALLBACK), "a model without byte fallback"),
            (not self._escapes_spaces, "a model that does not escape spaces"),
            (bool(self._training.get(_SPACE_BEHIND)), "a model with spaces behind words"),
            # Merges to it would make a byte of the text that spells it.
            (
                any(text[:cut] in normal and text[cut:] in normal for text in bytes_ for cut in range(1, 6)),
                "a model that merges the spelling of bytes",
            ),
        )
        return next((words for applies, words in cases if applies), None)

    @property
    def for_gigatoken(self) -> bytes:
        """The model for gigatoken, which recognizes control symbols in texts, and removes other spaces.

        The control symbols and the unknown one get names with a space, which is in no normalized text.
        """
        pieces, unknown = [], ""
        for number, piece in enumerate(self.pieces):
            is_named = piece.kind in (CONTROL, UNKNOWN)
            text = f" {number}" if is_named else piece.text
            unknown = text if piece.kind == UNKNOWN else unknown
            score = bytes([_SCORE << 3 | 5]) + struct.pack("<f", piece.score)
            kind = NORMAL if piece.kind == CONTROL else piece.kind
            pieces.append(_field(_PIECES, _field(_TEXT, text.encode()) + score + _field(_KIND, kind)))
        trainer = self._trainer + _field(_UNKNOWN_PIECE, unknown.encode())
        normalizer = self._normalizer + _field(_REMOVES_SPACES, 0)
        return b"".join((*pieces, _field(_TRAINER, trainer), _field(_NORMALIZER, normalizer)))


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


def _field(number: int, value: bytes | int) -> bytes:
    """Return one field of a message."""
    if isinstance(value, int):
        return _varint(number << 3 | _WHOLE) + _varint(value)
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def _piece(content: bytes) -> Piece:
    fields = dict(_fields(content))
    (score,) = struct.unpack("<f", fields.get(_SCORE, bytes(4)))
    return Piece(fields.get(_TEXT, b"").decode(), score, fields.get(_KIND, NORMAL))
