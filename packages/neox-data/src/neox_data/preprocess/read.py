"""Read corpus files as a stream of documents, with at most one of them in memory.

A line of a `.jsonl` file is an object with the requested keys, or a bare string; a value may be a list of
paragraphs. A `.json` file contains such lines, or one array of them. A `.txt` or `.md` file is one document,
a `.txt.gz` one per line. A `.dat` file of lm_dataformat contains texts, each after its length. Any of these
may be compressed, and may be in a `.tar` or `.zip`. In a `.parquet` file, rows are documents and columns are
keys.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from neox_data.errors import CorpusError
from neox_data.preprocess.archives import DAMAGES, TextStream, texts_in
from neox_data.preprocess.inputs import CorpusPart, format_of
from neox_data.preprocess.json_array import JsonArray, begins_array
from neox_data.preprocess.passed_over import PassedOver
from neox_data.preprocess.tables import rows_of
from neox_data.preprocess.texts import (
    MissingKeyError,
    TextFrom,
    cut_text,
    decode,
    text_under,
    texts_of_line,
)
from neox_data.preprocess.unpack import DamageError

__all__ = ["MAX_DOCUMENT_BYTES", "CorpusReader", "Document", "Remedies", "sample_texts"]

MAX_DOCUMENT_BYTES = 256 << 20

# A record starts with its length in bytes, as this number of decimal digits.
_LENGTH_DIGITS = 16
_BUFFER_BYTES = 1 << 20
# Limits of a sample: files, characters per file, characters per text.
_SAMPLE_FILES, _SAMPLE_CHARACTERS, _SAMPLE_TEXT = 4, 40_000, 4_000
_MOST_REASONS = 5


class Remedies(NamedTuple):
    """What the errors of a reader ask its user to do.

    Attributes:
        bad_document: about a document that cannot be read.
        missing_key: about a document without the key of its text.
        missing_column: about a table without it, behind the names of its columns.
    """

    bad_document: str
    missing_key: str
    missing_column: str

    @classmethod
    def with_options(cls, keys: str) -> "Remedies":
        """Return those of a command with --skip-bad-lines, given its options for keys, in words."""
        return cls(
            bad_document="correct it, or pass --skip-bad-lines to skip such documents",
            missing_key=f"pass another key with {keys}, or --skip-bad-lines to skip such documents",
            missing_column=f"pass one of them with {keys}",
        )


_OF_JSONL_KEYS = Remedies.with_options("--jsonl-keys")


class Document(NamedTuple):
    """One document of a corpus.

    Attributes:
        texts: the text of each requested key.
        num_bytes: its size in the (uncompressed) file.
        file: index of its file.
        offset: its start in the (uncompressed) file: a byte, or a row of a `.parquet`.
    """

    texts: tuple[str, ...]
    num_bytes: int
    file: int = 0
    offset: int = 0


def sample_texts(
    paths: Sequence[Path], keys: Sequence[str], remedies: Remedies = _OF_JSONL_KEYS
) -> list[str]:
    """Return parts of texts from the beginning of a few files, skipping unreadable documents.

    Raises:
        CorpusError: a compressed file is damaged.
    """
    texts = []
    for path in paths[:: -(-len(paths) // _SAMPLE_FILES) or 1]:
        left = _SAMPLE_CHARACTERS
        for document in CorpusReader([path], keys, skip_bad_lines=True, remedies=remedies):
            texts += [text[:_SAMPLE_TEXT] for text in document.texts]
            left -= sum(min(len(text), _SAMPLE_TEXT) for text in document.texts)
            if left <= 0:
                break
    return texts


class CorpusReader:
    """Iterates over the documents of files, in order.

    Args:
        paths: the files, or parts of them; see `find_inputs`.
        keys: requested keys of a JSON line. A document without keys is the text of each of them.
        skip_bad_lines: skip and count documents that cannot be read, instead of raising.
        max_document_bytes: maximum document size; larger documents are skipped and counted, and never wholly
            in memory.
        split_long: split larger documents instead of skipping them; lines and rows are then read whole.
        mend_text: repair wrongly decoded characters with ftfy.
        passed_over: files of the corpus that are not read; members of archives are added.
        text_from: function of (value, its name, the document) that makes a text of the value of a key, which
            every document must have; None: a text, or a list of paragraphs.
        optional_keys: keys besides `keys` that `text_from` uses, if a document has them.
        remedies: what errors ask the user to do.

    Attributes:
        total_bytes: size of the files on disk.
        passed_over: files and members that are not read.
        num_null: number of documents with a null instead of a text, which is read as an empty text.
        num_skipped: number of skipped documents.
        first_skipped: reason and location of the first few of them.
        num_too_long: number of documents skipped or split because of their size.
    """

    def __init__(
        self,
        paths: Sequence[Path | CorpusPart],
        keys: Sequence[str],
        *,
        skip_bad_lines: bool = False,
        max_document_bytes: int = MAX_DOCUMENT_BYTES,
        split_long: bool = False,
        mend_text: bool = False,
        passed_over: PassedOver | None = None,
        text_from: TextFrom | None = None,
        optional_keys: Sequence[str] = (),
        remedies: Remedies = _OF_JSONL_KEYS,
    ) -> None:
        self._parts = [one if isinstance(one, CorpusPart) else CorpusPart(one) for one in paths]
        self._keys = tuple(keys)
        self._skip_bad_lines = skip_bad_lines
        self._max_document_bytes = max_document_bytes
        self._split_long = split_long
        self._mend_text = mend_text
        self._text_from = text_from
        self._optional_keys = tuple(optional_keys)
        self._remedies = remedies
        self.num_too_long = 0
        self.total_bytes = sum(part.num_bytes for part in self._parts)
        self._bytes_before = 0
        self._reading: tuple[BinaryIO, int] | None = None
        self._file = self._offset = 0
        self._name = ""
        self.num_skipped = 0
        self.first_skipped: list[str] = []
        self.num_null = 0
        self.passed_over = passed_over if passed_over is not None else PassedOver()

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents.

        Raises:
            CorpusError: a document cannot be read and is not skipped, or a compressed file is damaged.
        """
        for number, part in enumerate(self._parts):
            self._file, self._offset, self._name = number, part.first, str(part)
            try:
                with part.path.open("rb", buffering=_BUFFER_BYTES) as raw:
                    raw.seek(part.first)
                    self._reading = raw, part.first
                    for document in self._documents(part, raw):
                        yield self._mended(document) if self._mend_text else document
                    self._reading = None
            except DAMAGES as error:
                # Not skipped: what is left of it may be most of the corpus.
                raise CorpusError(
                    f"{self._name} is damaged or truncated ({error}); copy it again, or move it to another "
                    "folder to continue without it",
                    code="damaged",
                ) from error
            self._bytes_before += part.num_bytes

    @property
    def bytes_done(self) -> int:
        """Return how much of `total_bytes` has been read."""
        if self._reading is None:
            return self._bytes_before
        raw, first = self._reading
        return self._bytes_before + raw.tell() - first

    def _documents(self, part: CorpusPart, raw: BinaryIO) -> Iterator[Document]:
        if format_of(part.path).kind == ".parquet":
            yield from self._read_rows(part.path)
            return
        for text in texts_in(str(part), part.path, raw, self.passed_over):
            self._name = text.name
            yield from self._reader_of(text, part)(text.stream, part.stop)
            self._name = str(part)

    def _reader_of(
        self, text: TextStream, part: CorpusPart
    ) -> Callable[[BinaryIO, int | None], Iterator[Document]]:
        if text.kind == ".json" and not part.first and part.stop is None and begins_array(text.stream):
            return self._read_array
        if format_of(part.path) == (".txt", ""):
            return self._read_text_file
        readers = {
            ".jsonl": self._read_json_lines,
            ".json": self._read_json_lines,
            ".txt.gz": self._read_text_lines,
            ".txt": self._read_whole,
            ".dat": self._read_records,
        }
        return readers[text.kind]

    def _lines(self, stream: BinaryIO, stop: int | None) -> Iterator[tuple[int, bytes, int]]:
        """Yield the number, the bytes and the offset of each line that is not too long, or will be split."""
        number = 0
        while (stop is None or self._offset < stop) and (
            line := stream.readline(self._max_document_bytes + 1)
        ):
            number += 1
            offset = self._offset
            self._offset += len(line)
            if len(line) > self._max_document_bytes:
                self.num_too_long += 1
                if not self._split_long:
                    while line and not line.endswith(b"\n"):
                        line = stream.readline(_BUFFER_BYTES)
                        self._offset += len(line)
                    continue
                rest = stream.readline()
                self._offset += len(rest)
                line += rest
            yield number, line, offset

    def _read_json_lines(self, stream: BinaryIO, stop: int | None) -> Iterator[Document]:
        for number, line, offset in self._lines(stream, stop):
            if line.isspace():
                continue
            try:
                texts = texts_of_line(line, self._keys, self._text_from)
            except ValueError as error:
                self._skip(f"{self._name}, line {number}", error)
                continue
            if None in texts or len(line) > self._max_document_bytes:
                yield from self._documents_of(texts, len(line), offset)
            else:
                # The same for nearly all lines, in less time.
                yield Document(cast(tuple[str, ...], texts), len(line), self._file, offset)

    def _read_text_lines(self, stream: BinaryIO, stop: int | None) -> Iterator[Document]:
        for number, line, offset in self._lines(stream, stop):
            yield from self._text(f"{self._name}, line {number}", line, offset)

    def _read_array(self, stream: BinaryIO, _: int | None) -> Iterator[Document]:
        array, before = JsonArray(stream), self._offset
        for number, (data, offset) in enumerate(array, 1):
            if len(data) > self._max_document_bytes:
                self.num_too_long += 1
                if not self._split_long:
                    continue
            try:
                texts = texts_of_line(data, self._keys, self._text_from)
            except ValueError as error:
                self._skip(f"{self._name}, element {number}", error)
                continue
            yield from self._documents_of(texts, len(data), before + offset)
        self._offset = before + array.num_bytes

    def _read_whole(self, stream: BinaryIO, _: int | None) -> Iterator[Document]:
        data = stream.read(self._max_document_bytes + 1)
        if len(data) > self._max_document_bytes:
            self.num_too_long += 1
            if not self._split_long:
                return
            data += stream.read()
        yield from self._text(self._name, data, self._offset)
        self._offset += len(data)

    def _read_text_file(self, stream: BinaryIO, stop: int | None) -> Iterator[Document]:
        r"""Read a text with its line ends as "\n", as lm_dataformat reads a `.txt`, and only it."""
        for document in self._read_whole(stream, stop):
            texts = [text.replace("\r\n", "\n").replace("\r", "\n") for text in document.texts]
            yield document._replace(texts=tuple(texts))

    def _read_records(self, stream: BinaryIO, _: int | None) -> Iterator[Document]:
        number = 0
        while digits := stream.read(_LENGTH_DIGITS):
            number += 1
            begin = self._offset + _LENGTH_DIGITS
            if len(digits) < _LENGTH_DIGITS or not digits.isdigit():
                raise CorpusError(f"{self._name} has no length before record {number}; copy the file again")
            length = int(digits)
            self._offset = begin + length
            self.num_too_long += length > self._max_document_bytes
            is_read = length <= self._max_document_bytes or self._split_long
            left, blocks = length, []
            while left and (block := stream.read(min(left, _BUFFER_BYTES))):
                left -= len(block)
                if is_read:
                    blocks.append(block)
            if left:
                raise DamageError(f"it ends within record {number}")
            if is_read:
                yield from self._text(f"{self._name}, record {number}", b"".join(blocks), begin)

    def _text(self, name: str, data: bytes, offset: int) -> Iterator[Document]:
        try:
            if self._text_from is not None:
                raise MissingKeyError(f"it is text, not an object with {' and '.join(map(repr, self._keys))}")
            text = decode(data)
        except ValueError as error:
            self._skip(name, error)
        else:
            yield from self._documents_of((text,) * len(self._keys), len(data), offset)

    def _documents_of(self, texts: tuple[str | None, ...], num_bytes: int, offset: int) -> Iterator[Document]:
        """Yield a document, or the parts into which it is split."""
        self.num_null += None in texts
        known = tuple(["" if text is None else text for text in texts])
        if num_bytes <= self._max_document_bytes:
            yield Document(known, num_bytes, self._file, offset)
            return
        parts = (cut_text(text, self._max_document_bytes) for text in known)
        for pieces in zip_longest(*parts, fillvalue=""):
            yield Document(pieces, sum(len(piece.encode()) for piece in pieces), self._file, offset)

    def _read_rows(self, path: Path) -> Iterator[Document]:
        rows = rows_of(path, self._keys, self._remedies.missing_column, self._optional_keys)
        for number, values in enumerate(rows):
            self._offset = number
            row = dict(zip((*self._keys, *self._optional_keys), values, strict=True))
            try:
                texts = tuple(text_under(key, row, self._text_from) for key in self._keys)
            except ValueError as error:
                self._skip(f"{path}, row {number + 1}", error)
                continue
            num_bytes = sum(len(text.encode()) for text in texts if text)
            self.num_too_long += num_bytes > self._max_document_bytes
            if num_bytes <= self._max_document_bytes or self._split_long:
                yield from self._documents_of(texts, num_bytes, number)

    def _mended(self, document: Document) -> Document:
        # Commands without --ftfy start a tenth faster without it.
        fix_text: Callable[[str], str] = import_module("ftfy").fix_text
        return document._replace(texts=tuple(map(fix_text, document.texts)))

    def _skip(self, place: str, error: ValueError) -> None:
        if not self._skip_bad_lines:
            is_missing = isinstance(error, MissingKeyError)
            remedy = self._remedies.missing_key if is_missing else self._remedies.bad_document
            raise CorpusError(f"{place}: {error}; {remedy}")
        self.num_skipped += 1
        if len(self.first_skipped) < _MOST_REASONS:
            self.first_skipped.append(f"{place}: {error}")
