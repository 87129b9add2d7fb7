"""The texts in a file: its own content, or the members of an archive, and of the archives in it.

The end of an archive is checked: a `.tar` must end with two blocks of zeros and nothing else, a `.zip` with a
directory that lists as many members as it counts and covers the file from its first byte to its last.
"""

import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self, cast

from neox_data.errors import CorpusError
from neox_data.preprocess.inputs import format_of
from neox_data.preprocess.passed_over import PassedOver
from neox_data.preprocess.unpack import DamageError, refuse_misnamed, unpacked

__all__ = ["DAMAGES", "TextStream", "texts_in"]

# What reading the members of a damaged archive raises.
DAMAGES = (DamageError, tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError)

# lm_dataformat reads each member of these as one text, whatever its name.
_ALL_TEXTS = (".tar.gz", ".tgz", ".tar.xz", "_data.xz", ".zip")
_MOST_NESTED = 4
_BUFFER_BYTES = 1 << 20
# A header that describes the next one, such as a long name, is read at once.
_MOST_DESCRIPTION_BYTES = 1 << 20
_DESCRIPTIONS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_ZIP64_LOCATOR, _ZIP64_LOCATOR_BYTES = b"PK\x06\x07", 20
_ZIP_END, _ZIP_END_BYTES, _MOST_COMMENT_BYTES = b"PK\x05\x06", 22, 0xFFFF


class TextStream(NamedTuple):
    """A stream of documents.

    Attributes:
        name: its file and member, for messages.
        kind: suffix of its format; see `FileFormat`.
        stream: its content.
    """

    name: str
    kind: str
    stream: BinaryIO


def texts_in(
    name: str, path: Path, raw: BinaryIO, passed_over: PassedOver, *, depth: int = 0
) -> Iterator[TextStream]:
    """Yield the texts in a file. Each must be read before the next; what is left of it is read to its end.

    Args:
        name: for messages.
        path: determines the format.
        raw: the content.
        passed_over: where members that are not read are recorded.
        depth: number of archives that the file is in.

    Raises:
        DamageError: the file or a member is damaged or incomplete.
        CorpusError: a member is encrypted, or compressed by an unsupported method.
    """
    kind, packing = format_of(path)
    stream = unpacked(raw, packing)
    if kind not in _MEMBERS:
        refuse_misnamed(stream)
        yield TextStream(name, kind, stream)
        if packing or depth:
            _read_to_end(stream)
        return
    if depth == _MOST_NESTED:
        raise DamageError(f"archives are nested more than {_MOST_NESTED} deep")
    has_texts_alone = path.name.lower().endswith(_ALL_TEXTS)
    for member, content in _MEMBERS[kind](stream, name, passed_over):
        inner, known = f"{name}, {member}", format_of(Path(member)).kind
        # The ends of tables and of .zip are read first, which a stream does not allow.
        if known in (".parquet", ".zip") or not (known or has_texts_alone):
            passed_over.add(inner)
        elif known:
            yield from texts_in(inner, Path(member), content, passed_over, depth=depth + 1)
        else:
            yield TextStream(inner, ".txt", content)
            _read_to_end(content)


def _read_to_end(stream: BinaryIO) -> None:
    """Read the rest of a text that is too long, because checksums are checked at the end."""
    while stream.read(_BUFFER_BYTES):
        pass


class _CheckedHeader(tarfile.TarInfo):
    """A header of a `.tar`. A damaged or missing one is an error; the library would end the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        """Read the next header."""
        place = archive.offset
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.EmptyHeaderError as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError("the blocks that end a tar archive are missing") from error
        except (tarfile.HeaderError, ValueError, OverflowError) as error:
            raise tarfile.ReadError(f"the header at byte {place:,} is damaged: {error}") from error

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> Self:  # type: ignore[override]
        """Parse a header."""
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0 or (header.type in _DESCRIPTIONS and header.size > _MOST_DESCRIPTION_BYTES):
            raise tarfile.InvalidHeaderError(f"the size is {header.size:,}")  # type: ignore[attr-defined]
        return header


def _tar_members(stream: BinaryIO, name: str, passed_over: PassedOver) -> Iterator[tuple[str, BinaryIO]]:
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_CheckedHeader, encoding="utf-8") as archive:
        while (member := archive.next()) is not None:
            # The library keeps every header.
            archive.members.clear()  # type: ignore[attr-defined]
            if member.isreg():
                yield member.name, cast(BinaryIO, archive.extractfile(member))
            elif not member.isdir():
                kind = "a link" if member.islnk() or member.issym() else "not a file"
                passed_over.add(f"{name}, {member.name}, which is {kind}")
        _check_tar_end(cast(BinaryIO, archive.fileobj))


def _check_tar_end(stream: BinaryIO) -> None:
    """Check what follows the first block of zeros, which ends the members."""
    block = stream.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise tarfile.ReadError("the second of the blocks that end a tar archive is missing")
    while block:
        if block.strip(b"\0"):
            raise tarfile.ReadError(
                "data follow the end of the tar archive; pass joined archives one by one, or join them with "
                "tar --concatenate"
            )
        block = stream.read(_BUFFER_BYTES)


def _zip_members(stream: BinaryIO, name: str, passed_over: PassedOver) -> Iterator[tuple[str, BinaryIO]]:
    try:
        with zipfile.ZipFile(stream) as archive:
            _check_zip_extent(archive, stream)
            for member in archive.infolist():
                if not member.is_dir():
                    with archive.open(member) as content:
                        yield member.filename, cast(BinaryIO, content)
    except RuntimeError as error:
        # Encrypted, or compressed by a method that zipfile lacks; damage can look like either.
        raise CorpusError(
            f"{name} cannot be read ({error}); extract its members and pass them, or copy it again if it is "
            "damaged",
            code="not-readable",
        ) from error
    except (ValueError, OverflowError) as error:
        raise zipfile.BadZipFile(str(error)) from error


def _check_zip_extent(archive: zipfile.ZipFile, stream: BinaryIO) -> None:
    """Check that the directory is complete, and that no other archive precedes or follows it."""
    members = archive.infolist()
    if members and all(member.header_offset for member in members):
        raise zipfile.BadZipFile("data precede the first member; pass joined archives one by one")
    size = stream.seek(0, 2)
    first = stream.seek(max(0, size - _ZIP_END_BYTES - _MOST_COMMENT_BYTES))
    tail = stream.read()
    place = tail.rfind(_ZIP_END)
    end = tail[place:]
    if len(end) != _ZIP_END_BYTES + int.from_bytes(end[20:22], "little"):
        raise zipfile.BadZipFile("data follow the end of the zip archive")
    count = int.from_bytes(end[10:12], "little")
    if count == 0xFFFF:
        count = _zip64_count(stream, first + place) or count
    if count != len(members):
        raise zipfile.BadZipFile(f"it lists {len(members):,} of {count:,} members")


def _zip64_count(stream: BinaryIO, end: int) -> int | None:
    """Return the number of members that the Zip64 record states; None if the archive has none.

    Args:
        stream: the archive.
        end: place of the end record, which the locator of the Zip64 record precedes.
    """
    stream.seek(max(0, end - _ZIP64_LOCATOR_BYTES))
    locator = stream.read(_ZIP64_LOCATOR_BYTES)
    if not locator.startswith(_ZIP64_LOCATOR):
        return None
    stream.seek(int.from_bytes(locator[8:16], "little"))
    return int.from_bytes(stream.read(40)[32:], "little")


_MEMBERS = {".tar": _tar_members, ".zip": _zip_members}
