"""Read damaged corpus files: every document is counted, or there is an error.

`make sweep NAME=archives` tries 3,000 files, the fast test a tenth of them.
"""

import bz2
import gzip
import io
import json
import logging
import lzma
import random
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from neox_data.errors import CorpusError
from neox_data.preprocess.read import CorpusReader

logger = logging.getLogger(__name__)

CASES = 3000
WORDS = ("the", "quick", "fox", "\u4f60\u597d", "caf\u00e9", "[", "]", '"', "\\", "{", "}", ",", "\n", "12")


class Form(NamedTuple):
    """A corpus file.

    Attributes:
        ending: of its name.
        data: its bytes.
        texts: its documents.
        silent: ends of the documents or compressed streams at which a cut leaves a whole file.
        is_checked: whether a checksum, or the structure around each document, shows changed bytes.
    """

    ending: str
    data: bytes
    texts: list[str]
    silent: Sequence[int] = ()
    is_checked: bool = True


def texts_of(choice: random.Random) -> list[str]:
    return [
        f"{number}: " + " ".join(choice.choice(WORDS) for _ in range(choice.randrange(1, 60)))
        for number in range(choice.randrange(2, 24))
    ]


def lines_of(texts: Sequence[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def tar_of(members: dict[str, bytes], style: int = tarfile.USTAR_FORMAT) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=style) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


def zip_of(members: dict[str, bytes], method: int) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return data.getvalue()


def table_of(texts: Sequence[str], **options: object) -> bytes:
    data = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": texts, "id": list(range(len(texts)))}), data, **options)
    return data.getvalue()


def streamed_frame(data: bytes) -> bytes:
    """Compress as lm_dataformat does: without the size of the content and without a checksum."""
    packer = zstandard.ZstdCompressor().compressobj()
    return packer.compress(data) + packer.flush()


def in_streams(texts: Sequence[str], pack: Callable[[bytes], bytes], ending: str) -> Form:
    """Return a file of several compressed streams, one after each few documents."""
    data, ends = b"", []
    for first in range(0, len(texts), 5):
        data += pack(lines_of(texts[first : first + 5]))
        ends.append(len(data))
    return Form(ending, data, list(texts), ends)


CHECKED_ZST = zstandard.ZstdCompressor(write_checksum=True).compress


def records_of(texts: Sequence[str]) -> Form:
    data, ends = b"", []
    for text in texts:
        data += b"%016d" % len(text.encode()) + text.encode()
        ends.append(len(data))
    return Form("x.dat", data, list(texts), ends, is_checked=False)


def plain_lines(texts: Sequence[str]) -> Form:
    data = lines_of(texts)
    ends = [place for place, byte in enumerate(data, 1) if byte == ord("\n")]
    return Form("x.jsonl", data, list(texts), [*ends, *(end - 1 for end in ends)], is_checked=False)


def members_of(texts: Sequence[str], folder: str = "") -> dict[str, bytes]:
    return {f"{folder}{number}.txt": text.encode() for number, text in enumerate(texts)}


def halves_of(texts: Sequence[str]) -> dict[str, bytes]:
    lines = lines_of(texts)
    return {"a.jsonl.gz": gzipped(lines), "b.jsonl.zst": CHECKED_ZST(lines)}


def array_of(texts: Sequence[str]) -> bytes:
    return json.dumps(texts, indent=1).encode()


def text_lines(texts: Sequence[str]) -> Form:
    lines = [text.replace("\n", " ") + "\n" for text in texts]
    return Form("x.txt.gz", gzipped("".join(lines).encode()), lines)


def nested_of(texts: Sequence[str]) -> bytes:
    tar = tar_of(members_of(texts))
    return tar_of({"1.tar": tar, "2_data.xz": xz(tar)})


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def xz(data: bytes) -> bytes:
    return lzma.compress(data, preset=0)


LONG = "long/" * 40
FORMS: list[Callable[[list[str]], Form]] = [
    plain_lines,
    records_of,
    lambda t: Form("x.json", array_of(t), t, silent=[0], is_checked=False),
    lambda t: in_streams(t, gzipped, "x.jsonl.gz"),
    lambda t: in_streams(t, CHECKED_ZST, "x.jsonl.zst"),
    lambda t: in_streams(t, bz2.compress, "x.jsonl.bz2"),
    lambda t: in_streams(t, xz, "x.jsonl.xz"),
    lambda t: Form("x.jsonl.zst", streamed_frame(lines_of(t)), t, is_checked=False),
    lambda t: Form("x.json.zst", CHECKED_ZST(array_of(t)), t),
    lambda t: Form("x.dat.zst", CHECKED_ZST(records_of(t).data), t),
    text_lines,
    lambda t: Form("x.tar", tar_of(members_of(t)), t),
    lambda t: Form("x.tar", tar_of(members_of(t, LONG), tarfile.PAX_FORMAT), t),
    lambda t: Form("x.tar", tar_of(members_of(t, LONG), tarfile.GNU_FORMAT), t),
    lambda t: Form("x.tar", tar_of(halves_of(t)), t * 2),
    lambda t: Form("x.jsonl.zst.tar", tar_of({"a.jsonl.zst": CHECKED_ZST(lines_of(t))}), t),
    lambda t: Form("x.tar.gz", gzipped(tar_of(members_of(t))), t),
    lambda t: Form("x.tar.zst", CHECKED_ZST(tar_of(halves_of(t))), t * 2),
    lambda t: Form("x.tar.xz", xz(nested_of(t)), t * 2),
    lambda t: Form("x.zip", zip_of(members_of(t), zipfile.ZIP_DEFLATED), t),
    lambda t: Form("x.zip", zip_of({**halves_of(t), "c": b"more"}, zipfile.ZIP_STORED), [*t * 2, "more"]),
    lambda t: Form("x.parquet", table_of(t, row_group_size=7), t, is_checked=False),
    lambda t: Form("x.parquet", table_of(t, write_page_checksum=True, compression="zstd"), t),
]


def cut(form: Form, choice: random.Random) -> bytes:
    size = len(form.data)
    places = [
        choice.randrange(size),
        size - choice.randrange(1, min(40, size)),
        choice.randrange(size) // 512 * 512,
        choice.choice(form.silent or [size]) + choice.randrange(-2, 3),
        choice.randrange(min(30, size)),
    ]
    return form.data[: max(0, choice.choice(places))]


def flip(form: Form, choice: random.Random) -> bytes:
    data = bytearray(form.data)
    for _ in range(choice.choice((1, 1, 2, 8))):
        data[choice.randrange(len(data))] ^= 1 << choice.randrange(8)
    return bytes(data)


def blank(form: Form, choice: random.Random) -> bytes:
    """Replace a range by zeros, as a lost block of a disk does."""
    unit = choice.choice((1, 512, 4096))
    first = choice.randrange(len(form.data)) // unit * unit
    stop = min(len(form.data), first + unit * choice.randrange(1, 4))
    return form.data[:first] + bytes(stop - first) + form.data[stop:]


def lose(form: Form, choice: random.Random) -> bytes:
    """Remove a range."""
    first = choice.randrange(len(form.data))
    return form.data[:first] + form.data[first + choice.randrange(1, 600) :]


def append(form: Form, choice: random.Random) -> bytes:
    return form.data + choice.choice((b"x", b"\0" * 513, choice.randbytes(700), form.data[:600], b"\0x"))


def join(form: Form, choice: random.Random) -> bytes:
    return form.data + form.data


DAMAGES = {kind.__name__: kind for kind in (cut, flip, blank, lose, append, join)}
# How a damaged file is packed once more; the outer file is whole.
WRAPS: dict[str, Callable[[str, bytes], tuple[str, bytes]]] = {
    "tar": lambda name, data: ("o.tar", tar_of({"first.txt": b"a", name: data, "last.txt": b"b"})),
    "tar.gz": lambda name, data: (
        "o.tar.gz",
        gzipped(tar_of({"first.txt": b"a", name: data, "last.txt": b"b"})),
    ),
    "zip": lambda name, data: (
        "o.zip",
        zip_of({"first.txt": b"a", name: data, "last.txt": b"b"}, zipfile.ZIP_DEFLATED),
    ),
}
NOT_NESTED = (".zip", ".parquet")


def verdict(path: Path) -> tuple[list[str], CorpusReader] | str:
    """Return the documents, or the error message."""
    reader = CorpusReader([path], ("text",))
    try:
        return [document.texts[0] for document in reader], reader
    except CorpusError as error:
        return str(error)


def try_damage(seed: int, folder: Path) -> str:
    """Damage one file and read it; return what happened, or fail."""
    choice = random.Random(seed)
    form = choice.choice(FORMS)(texts_of(choice))
    damage = choice.choice([*DAMAGES, "rename", "none"])
    if damage == "lose" and not form.is_checked:
        # What remains may be a whole file with fewer documents.
        damage = "flip"
    ending = form.ending
    damaged = data = DAMAGES[damage](form, choice) if damage in DAMAGES else form.data
    if damage == "rename":
        ending = choice.choice(FORMS)(["a"]).ending
    wrap = choice.choice(["", "", *WRAPS]) if not form.ending.endswith(NOT_NESTED) else ""
    is_wrapped = bool(wrap) and not ending.endswith(NOT_NESTED) and damage != "rename"
    if is_wrapped:
        ending, data = WRAPS[wrap](ending, data)
    path = folder / f"{seed}{ending}"
    path.write_bytes(data)
    found = verdict(path)
    path.unlink()
    what = f"seed {seed}: {damage} of {form.ending} in {ending}"
    if isinstance(found, str):
        assert damage != "none", f"{what}: {found}"
        assert path.name in found, what
        return "error"
    texts, reader = found
    assert reader.num_skipped == reader.passed_over.count == 0, what
    check(form, damage, damaged, texts[1:-1] if is_wrapped else texts, what)
    return "every document"


def check(form: Form, damage: str, damaged: bytes, texts: list[str], what: str) -> None:
    """Fail if a document was lost."""
    if damage == "rename":
        everything = "\n".join(texts)
        lost = [t for t in form.texts if t not in everything and json.dumps(t)[1:-1] not in everything]
        assert not lost, f"{what}: {len(lost)} of {len(form.texts)} documents are missing"
    elif damage == "join":
        everything = "".join(texts)
        lost = [text for text in form.texts if everything.count(text) < 2]
        assert not lost, f"{what}: {len(lost)} of {len(form.texts)} documents are missing"
    elif damage == "cut" and len(texts) < len(form.texts):
        # Nothing in the file records how many documents or streams there are; see README.
        assert form.silent, f"{what}: {len(texts)} of {len(form.texts)} documents"
        assert texts == form.texts[: len(texts)], what
    elif damage == "blank" and form.ending.endswith(".tar") and len(texts) < len(form.texts):
        # Zeros in place of the last members are the end of a tar archive.
        assert texts == form.texts[: len(texts)], what
        with tarfile.open(fileobj=io.BytesIO(form.data)) as archive:
            assert any(not damaged[member.offset :].strip(b"\0") for member in archive), what
    elif form.is_checked and form.ending != "x.tar":
        assert texts[: len(form.texts)] == form.texts, what
    else:
        assert len(texts) >= len(form.texts), f"{what}: {len(texts)} of {len(form.texts)} documents"


def try_all(seeds: range, folder: Path) -> None:
    counts = Counter(try_damage(seed, folder) for seed in seeds)
    logger.info("%d damaged files: %s", len(seeds), dict(counts))
    assert counts["error"] > len(seeds) / 3
    assert counts["every document"] > len(seeds) / 10


def test_no_document_of_a_damaged_file_is_lost(tmp_path: Path) -> None:
    try_all(range(0, CASES, 10), tmp_path)


@pytest.mark.sweep
def test_no_document_of_thousands_of_damaged_files_is_lost(tmp_path: Path) -> None:
    try_all(range(CASES), tmp_path)
