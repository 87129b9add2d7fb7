"""Corpus files as a stream of documents; never more than one of them in memory.

A line of a `.jsonl` file is an object with the wanted keys, or a bare string; a value may be a list of
paragraphs. A `.txt` file is one document. A `.dat` file of lm_dataformat holds texts, each after its length.
Any of these may be compressed with gzip or zstandard, and such files may lie in a `.tar`, as archives of
lm_dataformat do. A row of a `.parquet` file is a document, a column a key.
"""

import gzip
import io
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import ftfy
import zstandard

from neox_data.errors import CorpusError
from neox_data.preprocess.inputs import ARCHIVE, LINES, RECORDS, TABLES, TEXTS, CorpusPart, ending_of
from neox_data.preprocess.texts import cut_text, decode, text_of, texts_of_line

__all__ = ["MAX_DOCUMENT_BYTES", "CorpusReader", "Document", "sample_texts"]

MAX_DOCUMENT_BYTES = 256 << 20

# A record begins with its length in bytes, as so many decimal digits.
_LENGTH_DIGITS = 16
_BUFFER_BYTES = 1 << 20
_ROWS_AT_ONCE = 1024
# Of a sample: texts of up to so many files, and characters of each file and each text.
_SAMPLE_FILES, _SAMPLE_CHARACTERS, _SAMPLE_TEXT = 4, 40_000, 4_000
_MOST_REASONS = 5
_SKIP_HINT = "correct it, or pass --skip-bad-lines to leave such documents out"


class Document(NamedTuple):
    """One document of a corpus.

    Attributes:
        texts: the text of each wanted key.
        num_bytes: its size in the (unpacked) file.
        file: number of the file it is from.
        offset: where in the (unpacked) file it begins: a byte, or a row of a `.parquet`.
    """

    texts: tuple[str, ...]
    num_bytes: int
    file: int = 0
    offset: int = 0


def sample_texts(paths: Sequence[Path], keys: Sequence[str]) -> list[str]:
    """Pieces of texts from the beginnings of a few of the files; what is unreadable is left out.

    Raises:
        CorpusError: a compressed file is damaged.
    """
    texts = []
    for path in paths[:: -(-len(paths) // _SAMPLE_FILES) or 1]:
        left = _SAMPLE_CHARACTERS
        for document in CorpusReader([path], keys, skip_bad_lines=True):
            texts += [text[:_SAMPLE_TEXT] for text in document.texts]
            left -= sum(min(len(text), _SAMPLE_TEXT) for text in document.texts)
            if left <= 0:
                break
    return texts


class CorpusReader:
    """The documents of some files, in order.

    Args:
        paths: the files, or parts of them; see `find_inputs`.
        keys: the keys of a JSON line whose values are wanted. A document without keys is the text of each of
            them.
        skip_bad_lines: count documents that cannot be read and go on, instead of raising.
        max_document_bytes: larger documents are counted and left out, and never wholly in memory.
        split_long: cut larger documents into such as are small enough instead; a line or row is then read
            whole.
        mend_text: repair wrongly decoded characters with ftfy.

    Attributes:
        total_bytes: size of the files as they lie on the disk.
        num_skipped: documents left out.
        first_skipped: why the first few of them were, each with its place.
        num_too_long: documents left out, or cut, for their size.
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
    ) -> None:
        self._parts = [one if isinstance(one, CorpusPart) else CorpusPart(one) for one in paths]
        self._keys = tuple(keys)
        self._skip_bad_lines = skip_bad_lines
        self._max_document_bytes = max_document_bytes
        self._split_long = split_long
        self._mend_text = mend_text
        self.num_too_long = 0
        self.total_bytes = sum(part.num_bytes for part in self._parts)
        self._bytes_before = 0
        self._reading: tuple[BinaryIO, int] | None = None
        self._file = self._offset = 0
        self.num_skipped = 0
        self.first_skipped: list[str] = []

    def __iter__(self) -> Iterator[Document]:
        """The documents.

        Raises:
            CorpusError: a document cannot be read and is not to be skipped, or a compressed file is damaged.
        """
        for number, part in enumerate(self._parts):
            self._file, self._offset = number, part.first
            with part.path.open("rb", buffering=_BUFFER_BYTES) as raw, _damage_named(part.path):
                raw.seek(part.first)
                self._reading = raw, part.first
                documents = self._documents(part, raw)
                yield from map(self._mended, documents) if self._mend_text else documents
                self._reading = None
            self._bytes_before += part.num_bytes

    @property
    def bytes_done(self) -> int:
        """How much of `total_bytes` has been read."""
        if self._reading is None:
            return self._bytes_before
        raw, first = self._reading
        return self._bytes_before + raw.tell() - first

    def _documents(self, part: CorpusPart, raw: BinaryIO) -> Iterator[Document]:
        if ending_of(part.path) in TABLES:
            yield from self._read_rows(part.path)
            return
        for name, kind, stream in _members(part, raw):
            if kind in LINES:
                yield from self._read_lines(name, stream, part.stop)
            elif kind in RECORDS:
                yield from self._read_records(name, stream)
            else:
                yield from self._read_whole(name, stream)

    def _read_lines(self, name: str, stream: BinaryIO, stop: int | None) -> Iterator[Document]:
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
                    self._skip_line(line, stream)
                    continue
                rest = stream.readline()
                self._offset += len(rest)
                line += rest
            if line.isspace():
                continue
            try:
                texts = texts_of_line(line, self._keys)
            except ValueError as error:
                self._skip(f"{name}, line {number}: {error}")
                continue
            document = Document(texts, len(line), self._file, offset)
            if len(line) <= self._max_document_bytes:
                yield document
            else:
                yield from self._small_enough(document)

    def _skip_line(self, line: bytes, stream: BinaryIO) -> None:
        while line and not line.endswith(b"\n"):
            line = stream.readline(_BUFFER_BYTES)
            self._offset += len(line)

    def _read_whole(self, name: str, stream: BinaryIO) -> Iterator[Document]:
        data = stream.read(self._max_document_bytes + 1)
        if len(data) > self._max_document_bytes:
            self.num_too_long += 1
            if not self._split_long:
                return
            data += stream.read()
        yield from self._text(name, data, self._offset)
        self._offset += len(data)

    def _read_records(self, name: str, stream: BinaryIO) -> Iterator[Document]:
        number = 0
        while digits := stream.read(_LENGTH_DIGITS):
            number += 1
            begin = self._offset + _LENGTH_DIGITS
            if len(digits) < _LENGTH_DIGITS or not digits.isdigit():
                raise CorpusError(f"{name}, record {number} has no length before it; copy the file again")
            left = int(digits)
            self._offset = begin + left
            if left > self._max_document_bytes:
                self.num_too_long += 1
                if not self._split_long:
                    _skip_bytes(stream, left)
                    continue
            data = stream.read(left)
            if len(data) < left:
                raise CorpusError(f"{name} is damaged or cut off in record {number}; copy it again")
            yield from self._text(f"{name}, record {number}", data, begin)

    def _text(self, name: str, data: bytes, offset: int) -> Iterator[Document]:
        try:
            text = decode(data)
        except ValueError as error:
            self._skip(f"{name}: {error}")
        else:
            texts = (text,) * len(self._keys)
            yield from self._small_enough(Document(texts, len(data), self._file, offset))

    def _small_enough(self, document: Document) -> Iterator[Document]:
        """The document, or what it is cut into."""
        if document.num_bytes <= self._max_document_bytes:
            yield document
            return
        parts = (cut_text(text, self._max_document_bytes) for text in document.texts)
        for texts in zip_longest(*parts, fillvalue=""):
            yield document._replace(texts=texts, num_bytes=sum(len(text.encode()) for text in texts))

    def _read_rows(self, path: Path) -> Iterator[Document]:
        # Only where there is such a file: it takes longer to import than all else together.
        from pyarrow import ArrowInvalid, parquet  # type: ignore[import-untyped]

        number = 0
        try:
            with parquet.ParquetFile(path) as file:
                _check_columns(path, file.schema_arrow.names, self._keys)
                for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=list(self._keys)):
                    columns = (batch.column(key).to_pylist() for key in self._keys)
                    for values in zip(*columns, strict=True):
                        self._offset, number = number, number + 1
                        yield from self._row(f"{path}, row {number}", values)
        except ArrowInvalid as error:
            raise CorpusError(f"{path} is damaged or no parquet file ({error}); copy it again") from error

    def _row(self, name: str, values: tuple[Any, ...]) -> Iterator[Document]:
        try:
            texts = tuple(
                text_of(value, f"the value of {key!r}") for key, value in zip(self._keys, values, strict=True)
            )
        except ValueError as error:
            self._skip(f"{name}: {error}")
            return
        num_bytes = sum(len(text.encode()) for text in texts)
        is_long = num_bytes > self._max_document_bytes
        self.num_too_long += is_long
        if not is_long or self._split_long:
            yield from self._small_enough(Document(texts, num_bytes, self._file, self._offset))

    def _mended(self, document: Document) -> Document:
        return document._replace(texts=tuple(ftfy.fix_text(text) for text in document.texts))

    def _skip(self, reason: str) -> None:
        if not self._skip_bad_lines:
            raise CorpusError(f"{reason}; {_SKIP_HINT}")
        self.num_skipped += 1
        if len(self.first_skipped) < _MOST_REASONS:
            self.first_skipped.append(reason)


def _check_columns(path: Path, columns: Sequence[str], keys: Sequence[str]) -> None:
    for key in keys:
        if key not in columns:
            found = ", ".join(map(repr, columns[:8]))
            raise CorpusError(f"{path} has no column {key!r}, only {found}; name one with --jsonl-keys")


def _members(part: CorpusPart, raw: BinaryIO) -> Iterator[tuple[str, str, BinaryIO]]:
    """The text files that a file holds, itself or those of an archive: name for messages, ending, content."""
    path = part.path
    stream, kind = _unpacked(path, raw), ending_of(path)
    if kind != ARCHIVE:
        yield str(part), kind, stream
        return
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            file, name = archive.extractfile(member), Path(member.name)
            if file is not None and ending_of(name) in TEXTS:
                yield f"{path}, {name}", ending_of(name), _unpacked(name, cast(BinaryIO, file))


def _unpacked(path: Path, raw: BinaryIO) -> BinaryIO:
    # Both readers take a line apart from many small reads; a buffer before them is several times as fast.
    if path.suffix == ".gz":
        return cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=raw), _BUFFER_BYTES))
    if path.suffix == ".zst":
        reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=False)
        return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, reader), _BUFFER_BYTES))
    return raw


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error, zstandard.ZstdError, tarfile.TarError) as error:
        raise CorpusError(f"{path} is damaged or cut off ({error}); copy it again") from error


def _skip_bytes(stream: BinaryIO, count: int) -> None:
    while count and (block := stream.read(min(count, _BUFFER_BYTES))):
        count -= len(block)
