"""The end of each compressed file and archive is checked, and what is not read is named."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from neox_data.errors import CorpusError
from neox_data.preprocess.inputs import cut_file, find_inputs
from neox_data.preprocess.json_array import JsonArray
from neox_data.preprocess.passed_over import PassedOver
from neox_data.preprocess.read import CorpusReader
from neox_data.preprocess.unpack import DamageError
from support.refusals import refused

LINES = b"".join(json.dumps({"text": f"{number} " * 40}).encode() + b"\n" for number in range(300))
PACKS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def tar_of(members: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


def zip_of(members: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return data.getvalue()


def texts(path: Path, data: bytes, **options: object) -> list[str]:
    path.write_bytes(data)
    return [document.texts[0] for document in CorpusReader([path], ("text",), **options)]


@pytest.mark.parametrize("ending", PACKS)
def test_compressed_files_are_read_to_their_proven_end(tmp_path: Path, ending: str) -> None:
    pack, path = PACKS[ending], tmp_path / f"a.jsonl{ending}"
    whole = pack(LINES)
    assert len(texts(path, whole)) == 300
    assert len(texts(path, whole + pack(b'{"text": "more"}\n'))) == 301
    for stop in (len(whole) - 1, len(whole) // 2, 5, 1, 0):
        with refused(CorpusError, f"a.jsonl{ending}", code="damaged"):
            texts(path, whole[:stop])
        if stop:
            with refused(CorpusError, "stream 2", code="damaged"):
                texts(path, whole + whole[:stop])
    with refused(CorpusError, code="damaged"):
        texts(path, whole + b"some garbage")
    # Damage is never skipped.
    with refused(CorpusError, code="damaged"):
        texts(path, whole[:-1], skip_bad_lines=True)


@pytest.mark.parametrize("ending", [".gz", ".xz"])
def test_padding_may_follow_where_the_format_allows_it(tmp_path: Path, ending: str) -> None:
    whole = PACKS[ending](LINES)
    assert len(texts(tmp_path / f"a.jsonl{ending}", whole + bytes(1024))) == 300
    with refused(CorpusError, code="damaged"):
        texts(tmp_path / f"a.jsonl{ending}", whole + bytes(1024) + whole)


def test_changed_checksum_of_zstandard_is_found(tmp_path: Path) -> None:
    frame = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(LINES))
    frame[-1] ^= 1
    with refused(CorpusError, "stream 1", code="damaged"):
        texts(tmp_path / "a.jsonl.zst", frame)


def test_windows_of_long_range_matching_are_decompressed(tmp_path: Path) -> None:
    settings = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    assert len(texts(tmp_path / "a.jsonl.zst", packer.compress(LINES) + packer.flush())) == 300


def test_skippable_frames_contain_no_documents(tmp_path: Path) -> None:
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    data = skippable + zstandard.compress(LINES) + skippable
    assert len(texts(tmp_path / "a.jsonl.zst", data)) == 300
    with refused(CorpusError, "stream 3", code="damaged"):
        texts(tmp_path / "a.jsonl.zst", data[:-2])


def test_tar_archives_end_only_with_their_end_blocks(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    members = {f"{number}.txt": b"x" * 600 for number in range(300)}
    whole = tar_of(members)
    header_100, stop = 100 * 1536, 300 * 1536
    assert len(texts(path, whole)) == 300
    for damaged, reason in {
        whole[:header_100]: "the blocks that end a tar archive are missing",
        whole[: header_100 + 100]: "the header at byte 153,600 is damaged: truncated header",
        whole[: header_100 + 700]: "unexpected end of data",
        whole[:header_100] + b"?" + whole[header_100 + 1 :]: "the header at byte 153,600 is damaged: bad",
        whole[:stop]: "the blocks that end a tar archive are missing",
        whole[: stop + 512]: "the second of the blocks that end a tar archive is missing",
        whole + whole: "data follow the end of the tar archive; pass joined archives one by one",
        whole[:header_100] + bytes(1536) + whole[header_100 + 1536 :]: "data follow the end",
        b"": "the blocks that end",
    }.items():
        with pytest.raises(CorpusError) as caught:
            texts(path, damaged)
        assert str(path) in str(caught.value)
        assert reason in str(caught.value)


def test_descriptions_of_tar_members_have_a_maximum_size(tmp_path: Path) -> None:
    header = tarfile.TarInfo("a")
    header.type, header.size = tarfile.XHDTYPE, 1 << 33
    with refused(CorpusError, "byte 0", "8,589,934,592", code="damaged"):
        texts(tmp_path / "a.tar", header.tobuf(tarfile.GNU_FORMAT) + bytes(10240))


def test_the_count_of_a_zip64_archive_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    whole = bytearray(zip_of({"a.txt": b"one", "b.txt": b"two"}))
    # The record of a small archive has the count in both places; 65,535 refers to the Zip64 record.
    whole[-14:-10] = b"\xff" * 4
    assert texts(tmp_path / "a.zip", bytes(whole)) == ["one", "two"]
    record = whole.index(b"PK\x06\x06")
    whole[record + 32] = 70
    with refused(CorpusError, "lists 2", "70 members", code="damaged"):
        texts(tmp_path / "a.zip", bytes(whole))


def test_zip_archives_are_covered_by_their_directory(tmp_path: Path) -> None:
    path, whole = tmp_path / "a.zip", zip_of({"a.txt": b"one", "b.jsonl": b'{"text": "two"}', "sub/": b""})
    assert texts(path, whole) == ["one", "two"]
    end = whole.rindex(b"PK\x05\x06")
    fewer = whole[: end + 10] + b"\x02\x00" + whole[end + 12 :]
    for damaged, reason in {
        whole[:-1]: "a.zip",
        whole[:200]: "not a zip",
        whole + whole: "precede the first",
        whole + b"more": "follow the end",
        fewer: "3 of 2",
        whole.replace(b"one", b"0ne"): "CRC-32",
    }.items():
        with refused(CorpusError, reason, code="damaged"):
            texts(path, damaged)


def test_encrypted_members_are_named_with_the_remedy(tmp_path: Path) -> None:
    data = bytearray(zip_of({"a.txt": b"one"}))
    # The flag of encryption, in the member's header and in the directory.
    data[6] |= 1
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    with refused(CorpusError, "a.zip", "a.txt", code="not-readable"):
        texts(tmp_path / "a.zip", data)


def test_text_of_a_member_that_is_too_long_is_still_checked(tmp_path: Path) -> None:
    data = zip_of({"a.txt": b"x" * 1000, "b": b"y" * 1000})
    assert texts(tmp_path / "a.zip", data, max_document_bytes=10) == []
    for old in (b"xx", b"yy"):
        with refused(CorpusError, "CRC-32", code="damaged"):
            texts(tmp_path / "a.zip", data[::-1].replace(old, b"zz", 1)[::-1], max_document_bytes=10)


def test_archives_in_archives_are_read_to_a_limit(tmp_path: Path) -> None:
    data = tar_of({"a.txt": b"one"})
    for number in range(4):
        assert texts(tmp_path / "a.tar", data) == ["one"]
        data = tar_of({f"{number}.tar": data})
    with refused(CorpusError, "4 deep", code="damaged"):
        texts(tmp_path / "a.tar", data)


@pytest.mark.parametrize(
    "data",
    [*(pack(LINES) for pack in PACKS.values()), tar_of({"a": b""}), zip_of({"a": b""})],
    ids=[*PACKS, ".tar", ".zip"],
)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.dat", "a.json"])
def test_archives_with_the_name_of_a_text_are_refused(tmp_path: Path, name: str, data: bytes) -> None:
    with refused(CorpusError, code="damaged"):
        texts(tmp_path / name, data, skip_bad_lines=True)


def test_members_that_are_not_read_are_counted_and_named(tmp_path: Path) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, kind in (("d", tarfile.DIRTYPE), ("l", tarfile.SYMTYPE), ("f", tarfile.FIFOTYPE)):
            info = tarfile.TarInfo(name)
            info.type = kind
            archive.addfile(info)
        for name in ("a.csv", "b.parquet", "c.zip", "d.txt"):
            archive.addfile(tarfile.TarInfo(name))
    path = tmp_path / "a.tar"
    path.write_bytes(data.getvalue())
    reader = CorpusReader([path], ("text",))
    assert [document.texts for document in reader] == [("",)]
    assert reader.passed_over.count == 5
    assert reader.passed_over.first == [
        *(f"{path}, {which}" for which in ("l, which is a link", "f, which is not a file")),
        f"{path}, a.csv", f"{path}, b.parquet", f"{path}, c.zip",
    ]  # fmt: skip


def test_files_of_folders_that_are_not_read_are_counted_and_named(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.jsonl", "b.csv", "sub/c.txt", "sub/_SUCCESS", "d.parquet.gz"):
        (folder / name).touch()
    (folder / "link").symlink_to(tmp_path)
    passed_over = PassedOver()
    assert [path.name for path in find_inputs([str(folder)], passed_over)] == ["a.jsonl", "c.txt"]
    assert set(passed_over.first) == {
        f"{folder}/link, a link to a folder", f"{folder}/b.csv", f"{folder}/d.parquet.gz",
        f"{folder}/sub/_SUCCESS",
    }  # fmt: skip
    assert next(iter(passed_over.lines())).startswith("4 files, ")
    # A folder that matches a pattern is read like one that is named.
    assert [path.name for path in find_inputs([f"{tmp_path}/i*"])] == ["a.jsonl", "c.txt"]
    assert [path.name for path in find_inputs([f"{tmp_path}/in/**/*.txt"])] == ["c.txt"]
    with refused(CorpusError, "d.parquet.gz", code="unsupported-ending"):
        find_inputs([f"{folder}/d.parquet.gz"])


ARRAY = b' [ "one" , {"text": "a ] \\" [", "n": [1, [2]]}, ["x", "y"],\n"\\\\" ] \n'


@pytest.mark.parametrize("name", ["a.json", "a.json.zst"])
@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 20])
def test_an_array_is_a_document_per_element(
    tmp_path: Path, name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neox_data.preprocess.json_array._BUFFER_BYTES", block)
    path = tmp_path / name
    path.write_bytes(zstandard.compress(ARRAY) if name.endswith(".zst") else ARRAY)
    documents = list(CorpusReader([path], ("text",)))
    assert [document.texts[0] for document in documents] == ["one", 'a ] " [', "x\n\ny", "\\"]
    assert [ARRAY[document.offset :][:1] for document in documents] == [b'"', b"{", b"[", b'"']
    assert [document.offset for document in documents] == [3, 11, 48, 60]


@pytest.mark.parametrize("block", [1, 4, 1 << 20])
def test_elements_above_the_limit_are_counted(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neox_data.preprocess.json_array._BUFFER_BYTES", block)
    path = tmp_path / "a.json"
    path.write_bytes(b'["' + b"x" * 100 + b'", "one", "' + b"y" * 100 + b'"]')
    reader = CorpusReader([path], ("text",), max_document_bytes=20)
    assert [(document.texts[0], document.offset) for document in reader] == [("one", 105)]
    assert reader.num_too_long == 2
    reader = CorpusReader([path], ("text",), max_document_bytes=60, split_long=True)
    assert [len(document.texts[0]) for document in reader] == [60, 40, 3, 60, 40]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'["one", "two"', "element 2"),
        (b'["one", "tw', "element 2"),
        (b"[", "element 1"),
        (b'["one"]\n["two"]', "but more follows"),
        (b'["one"}', "element 1"),
        (b'["one",,"two"]', "element 2"),
        (b'["one", 3]', "a.json, element 2"),
    ],
)
def test_damaged_arrays_are_named(tmp_path: Path, data: bytes, reason: str) -> None:
    with refused(CorpusError, reason):
        texts(tmp_path / "a.json", data)


def test_empty_arrays_contain_no_document(tmp_path: Path) -> None:
    assert texts(tmp_path / "a.json", b"[ ]\n") == []


def test_arrays_are_never_cut_into_parts(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'["one",\n"two",\n"three"]')
    assert len(list(cut_file(tmp_path / "a.json", 5))) == 1
    (tmp_path / "a.json").write_bytes(b'"one"\n"two"\n"three"')
    assert len(list(cut_file(tmp_path / "a.json", 5))) == 3


@pytest.mark.parametrize("split_long", [False, True])
def test_records_that_are_cut_are_never_skipped(tmp_path: Path, split_long: bool) -> None:
    data = b"%016d" % 3 + b"one" + b"9" * 16 + b"cut"
    with refused(CorpusError, "record 2", code="damaged"):
        texts(tmp_path / "a.dat", data, max_document_bytes=10, split_long=split_long)


def test_an_element_that_is_not_json_is_found_without_reading_the_rest():
    rest = b'"a document", ' * (1 << 19)
    array = JsonArray(io.BytesIO(b'["one", {oops}, ' + rest + b'"end"]'))
    with refused(DamageError, "element 2"):
        list(array)
    assert array.num_bytes < len(rest) / 2
