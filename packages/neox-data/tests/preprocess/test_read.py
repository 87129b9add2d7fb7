import gzip
import io
import json
import lzma
import os
import tarfile
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from neox_data.errors import CorpusError
from neox_data.preprocess.conversations import messages_in
from neox_data.preprocess.inputs import cut_file, find_inputs
from neox_data.preprocess.read import CorpusReader, sample_texts
from support.refusals import refused


def write(path: Path, *lines: bytes | str) -> Path:
    data = b"\n".join(line.encode() if isinstance(line, str) else line for line in lines)
    pack = {".gz": gzip.compress, ".zst": zstandard.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(data))
    return path


def texts(*paths: Path, keys: tuple[str, ...] = ("text",)) -> list[tuple[str, ...]]:
    return [document.texts for document in CorpusReader(paths, keys)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst"])
def test_lines_are_documents(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, '{"text": "one"}', "", '{"id": 2, "text": "two\\nlines"}', "  ")
    assert texts(path) == [("one",), ("two\nlines",)]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.xz", "a.txt.zst", "a.md", "a.markdown", "a.md.gz"])
def test_a_txt_file_is_one_document(tmp_path: Path, name: str) -> None:
    assert texts(write(tmp_path / name, "one", "two")) == [("one\ntwo",)]


def test_a_line_may_be_a_string_and_a_text_a_list(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '"bare"', '{"text": ["one", "two"]}', '["three", "four"]')
    assert texts(path) == [("bare",), ("one\n\ntwo",), ("three\n\nfour",)]


def test_several_keys_give_several_texts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "body", "title": "head"}', '"bare"')
    assert texts(path, keys=("title", "text")) == [("head", "body"), ("bare", "bare")]


def test_byte_order_mark_is_not_part_of_the_text(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "one"}')) == [("one",)]


def test_progress_ends_at_the_size_on_the_disk(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.jsonl.gz", *['{"text": "one"}'] * 50), write(tmp_path / "b.txt", "two")]
    reader = CorpusReader(paths, ("text",))
    done = [reader.bytes_done for _ in reader]
    assert done == sorted(done)
    assert reader.bytes_done == reader.total_bytes == sum(path.stat().st_size for path in paths)


BAD_LINES = {
    '{"text": ': "line 2: not JSON (Expecting value at column 10)",
    "[" * 100_000: "line 2: the JSON is nested too deeply",
    '{"title": "a"}': "line 2: no key 'text'; its keys are 'title'",
    '{"text": 3}': "line 2: the value of 'text' is int, not text",
    '{"text": ["a", 3]}': "line 2: the value of 'text' is list, not text",
    f'{{"text": "a", "n": {"9" * 6000}}}': "line 2: the JSON has a whole number of more than 4,300 digits",
    "17": "line 2: the line is int, not text",
    '{"text": "a\\ud800b"}': "line 2: the value of 'text' contains an unpaired surrogate at character 1",
    b'{"text": "\xff"}': "line 2: not UTF-8 (byte 0xff at position 11)",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=BAD_LINES.values())
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path: Path, line: bytes | str) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "one"}', line, '{"text": "three"}')
    with pytest.raises(CorpusError) as caught:
        texts(path)
    remedy = (
        "pass another key with --jsonl-keys, or --skip-bad-lines to skip such documents"
        if "no key" in BAD_LINES[line]
        else "correct it, or pass --skip-bad-lines to skip such documents"
    )
    assert str(caught.value) == f"{path}, {BAD_LINES[line]}; {remedy}"
    reader = CorpusReader([path], ("text",), skip_bad_lines=True)
    assert [document.texts for document in reader] == [("one",), ("three",)]
    assert reader.num_skipped == 1
    assert reader.first_skipped == [f"{path}, {BAD_LINES[line]}"]


def test_a_nul_is_a_character_like_any_other(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.jsonl", '{"text": "a\\u0000b"}'), write(tmp_path / "b.txt", b"c\0d")]
    assert texts(*paths) == [("a\0b",), ("c\0d",)]
    with refused(CorpusError, "line 1", "JSON", "1"):
        texts(write(tmp_path / "c.jsonl", b"\0\0\0"))


def test_only_the_first_few_reasons_are_kept(tmp_path: Path) -> None:
    reader = CorpusReader([write(tmp_path / "a.jsonl", *["{"] * 100)], ("text",), skip_bad_lines=True)
    assert list(reader) == []
    assert reader.num_skipped == 100
    assert [reason.split(":")[0].split()[-1] for reason in reader.first_skipped] == ["1", "2", "3", "4", "5"]


def test_a_text_file_that_is_not_utf8_is_named_or_skipped(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.txt", b"\xff"), write(tmp_path / "b.txt", "good")]
    with refused(CorpusError, "a.txt", "UTF-8", "0xff"):
        texts(*paths)
    assert len(list(CorpusReader(paths, ("text",), skip_bad_lines=True))) == 1


@pytest.mark.parametrize("damage", ["cut", "not gzip", "changed"])
def test_a_damaged_archive_is_named_and_never_skipped(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path / "a.jsonl.gz", *[json.dumps({"text": str(i) * 50}) for i in range(300)])
    data = bytearray(path.read_bytes())
    data[40] ^= 255
    path.write_bytes({"cut": path.read_bytes()[:-20], "not gzip": b"{}" * 9, "changed": data}[damage])
    with refused(CorpusError, "a.jsonl.gz", code="damaged"):
        list(CorpusReader([path], ("text",), skip_bad_lines=True))


def test_inputs_are_files_patterns_and_lists(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c,d.txt", "e.txt.gz"):
        (tmp_path / name).touch()
    names = [f"{tmp_path}/*.jsonl", f"{tmp_path}/c,d.txt", f"{tmp_path}/e.txt.gz, {tmp_path}/a.jsonl"]
    assert [path.name for path in find_inputs(names)] == [
        "a.jsonl",
        "b.jsonl",
        "c,d.txt",
        "e.txt.gz",
        "a.jsonl",
    ]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("missing.jsonl", "missing.jsonl does not"),
        ("*.jsonl", "correct the pattern"),
        ("", ".bz2 or .xz"),
        ("a.csv", "a.csv has an"),
    ],
)
def test_unsupported_input_files_are_refused(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "a.csv").touch()
    with refused(CorpusError, sentence):
        find_inputs([f"{tmp_path}/{name}"])


@pytest.mark.parametrize("name", ["b.jsonl", "*.jsonl", "**/*.jsonl", "", "a.jsonl,b.jsonl"])
@pytest.mark.parametrize("kind", ["broken link", "loop", "pipe"])
def test_files_that_cannot_be_read_are_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").touch()
    if kind == "pipe":
        os.mkfifo("b.jsonl")
    else:
        Path("b.jsonl").symlink_to("b.jsonl" if kind == "loop" else "gone.jsonl")
    sentence = "is not a regular file; write" if kind == "pipe" else "is a link that leads to no file"
    with refused(CorpusError, f"b.jsonl {sentence}"):
        find_inputs([name or str(tmp_path)])


def test_a_name_that_cannot_be_looked_up_is_not_said_to_be_missing() -> None:
    """A name that is too long stands for one in a folder without permission: root may enter every folder."""
    with refused(OSError, "File name too"):
        find_inputs(["x" * 300])


def test_a_list_of_names_may_be_longer_than_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [f"a-file-with-a-name-of-this-length-{number}.jsonl" for number in range(200)]
    for name in names:
        Path(name).touch()
    assert [str(path) for path in find_inputs([",".join(names)])] == names


def test_a_folder_is_the_readable_files_below_it(tmp_path: Path) -> None:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    for name in ("b.jsonl.zst", "deep/a.txt", "c.csv", "README"):
        (tmp_path / "data" / name).touch()
    (tmp_path / "data" / "deep" / "loop").symlink_to(tmp_path / "data")
    paths = find_inputs([f"{tmp_path}/data"])
    assert [str(path.relative_to(tmp_path / "data")) for path in paths] == ["b.jsonl.zst", "deep/a.txt"]


def test_endings_are_accepted_in_upper_case(tmp_path: Path) -> None:
    (tmp_path / "A.TXT").write_text("one")
    (tmp_path / "B.JSON").write_text('[{"text": "two"}]')
    (tmp_path / "C.Jsonl.GZ").write_bytes(gzip.compress(b'{"text": "three"}\n'))
    (tmp_path / "D.JSONL").write_text('{"text": "four"}\n{"text": "five"}\n')
    paths = find_inputs([str(tmp_path)])
    reader = CorpusReader(paths, ("text",))
    assert [document.texts[0] for document in reader] == ["one", "two", "three", "four", "five"]
    assert len(list(cut_file(tmp_path / "D.JSONL", 10))) == 2


def test_several_zstandard_frames_are_one_file(tmp_path: Path) -> None:
    frames = [zstandard.compress(json.dumps({"text": text}).encode() + b"\n") for text in ("one", "two")]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert texts(tmp_path / "a.jsonl.zst") == [("one",), ("two",)]


def test_a_damaged_zstandard_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.zst", *[json.dumps({"text": str(i) * 50}) for i in range(300)])
    path.write_bytes(b"x" + path.read_bytes())
    with refused(CorpusError, "a.jsonl.zst", code="damaged"):
        texts(path)


@pytest.mark.parametrize("name", ["a.jsonl.zst.tar", "a.tar", "a.tgz", "a.tar.gz"])
def test_an_archive_is_the_documents_of_its_members(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    members = [
        write(
            tmp_path / "in" / "data_0.jsonl.zst", '{"text": "one", "meta": {}}', '{"text": ["two", "three"]}'
        ),
        write(tmp_path / "in" / "b.txt", "four"),
        write(tmp_path / "in" / "c.bin", "no"),
    ]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for member in members:
            archive.add(member, member.name)
    data = packed.getvalue()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if path.suffix in (".gz", ".tgz") else data)
    assert find_inputs([str(path)]) == [path]
    reader = CorpusReader([path], ("text",))
    # lm_dataformat reads every member of a compressed tar archive as a text.
    others = [("no",)] if path.suffix in (".gz", ".tgz") else []
    assert [document.texts for document in reader] == [("one",), ("two\n\nthree",), ("four",), *others]
    assert reader.passed_over.first == ([] if others else [f"{path}, c.bin"])


def test_rows_of_a_parquet_file_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = {"text": ["one", "caf\u00e9", None], "title": ["1", "2", "3"], "score": [1.0, 2.0, 3.0]}
    parquet.write_table(pyarrow.table(table), path)
    reader = CorpusReader([path], ("title", "text"), skip_bad_lines=True)
    assert [(document.texts, document.num_bytes) for document in reader] == [
        (("1", "one"), 4),
        (("2", "caf\u00e9"), 6),
        (("3", ""), 1),
    ]
    assert (reader.num_null, reader.num_skipped) == (1, 0)
    with refused(CorpusError, "'body'", "'text', 'title', 'score'"):
        texts(path, keys=("body",))


def test_null_is_an_empty_text_and_counted(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"text": ["one", None]}), tmp_path / "a.parquet")
    write(tmp_path / "b.jsonl", '{"text": null}', '{"text": "two"}')
    reader = CorpusReader([tmp_path / "a.parquet", tmp_path / "b.jsonl"], ("text",))
    assert [document.texts for document in reader] == [("one",), ("",), ("",), ("two",)]
    assert reader.num_null == 2
    with refused(CorpusError, "line 1"):
        texts(write(tmp_path / "c.jsonl", "null"))


def test_cells_that_are_not_utf8_are_named_or_skipped(tmp_path: Path) -> None:
    cells = pyarrow.array([b"one", b"\xff", b"three"])
    text = pyarrow.Array.from_buffers(pyarrow.string(), 3, cells.buffers())
    for name, column in (("a", text), ("b", cells)):
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(pyarrow.table({"text": column}), path)
        with refused(CorpusError, f"{name}.parquet", "row 2", "UTF-8"):
            texts(path)
        reader = CorpusReader([path], ("text",), skip_bad_lines=True)
        assert [document.texts[0] for document in reader] == ["one", "three"]


def test_a_text_that_is_not_utf8_within_an_object_is_named(tmp_path: Path) -> None:
    cells = pyarrow.array([b"one", b"a\xff"])
    column = pyarrow.Array.from_buffers(pyarrow.string(), 2, cells.buffers())
    table = pyarrow.table(
        {"messages": pyarrow.StructArray.from_arrays([column, column], ["role", "content"])}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    found: list[object] = []
    [*CorpusReader([tmp_path / "a.parquet"], ("messages",), text_from=lambda value, *_: found.append(value))]
    assert found == [{"role": "one", "content": "one"}, b"a\xff"]
    with refused(ValueError, "UTF-8", "0xff", "2"):
        messages_in(found[1], "it")


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.binary(), pyarrow.large_string()])
def test_what_begins_a_cell_is_part_of_its_text(tmp_path: Path, kind: pyarrow.DataType) -> None:
    """U+FEFF is a byte order mark at the beginning of a file, and a character in a table."""
    table = pyarrow.table({"text": pyarrow.array(["\ufeffone".encode(), b"two\xef\xbb\xbf"]).cast(kind)})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == [("\ufeffone",), ("two\ufeff",)]


def test_maps_and_texts_of_the_type_json_are_objects(tmp_path: Path) -> None:
    texts_of_json = pyarrow.ExtensionArray.from_storage(
        pyarrow.json_(), pyarrow.array(['{"b": null, "a": 1.0}', None, "{"])
    )
    calls = pyarrow.StructArray.from_arrays(
        [texts_of_json, pyarrow.array(["7", None, "8"])], ["arguments", "id"]
    )
    maps = pyarrow.MapArray.from_arrays([0, 2, 2, 3], ["city", "b", "c"], texts_of_json)
    found: list[Any] = []
    table = pyarrow.table({"maps": maps, "calls": calls})
    parquet.write_table(table, tmp_path / "a.parquet")
    path = tmp_path / "a.parquet"
    [*CorpusReader([path], ("maps", "calls"), text_from=lambda value, *_: found.append(value))]
    known = {"b": None, "a": 1.0}
    assert found[::2] == [{"city": known, "b": None}, {}, {"c": "{"}]
    # What is not JSON is left to what reads the value.
    assert [each["arguments"] for each in found[1::2]] == [known, None, "{"]


def test_damage_within_a_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"{number} " * 30 for number in range(500)]})
    parquet.write_table(table, path, write_page_checksum=True, row_group_size=100)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:2000], whole[:500] + b"?" + whole[501:], whole + whole, b""):
        path.write_bytes(damaged)
        with refused(CorpusError, "a.parquet", code="damaged"):
            texts(path)


def test_invalid_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"no table at all")
    with refused(CorpusError, "a.parquet", code="damaged"):
        texts(tmp_path / "a.parquet")


def test_documents_above_the_limit_are_counted_and_left_out(tmp_path: Path) -> None:
    long = '{"text": "' + "x" * 3_000_000 + '"}'
    paths = [
        write(tmp_path / "a.jsonl", long, '{"text": "one"}', long, '{"text": "two"}', long),
        write(tmp_path / "b.txt", "y" * 1001),
        write(tmp_path / "c.txt", "z" * 1000),
    ]
    parquet.write_table(pyarrow.table({"text": ["v" * 1001, "three"]}), tmp_path / "d.parquet")
    reader = CorpusReader([*paths, tmp_path / "d.parquet"], ("text",), max_document_bytes=1000)
    assert [text[:5] for document in reader for text in document.texts] == ["one", "two", "zzzzz", "three"]
    assert (reader.num_too_long, reader.num_skipped) == (5, 0)


def test_a_line_of_exactly_the_limit_is_a_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '"abcd"', '"abcde"', '"abc"')
    reader = CorpusReader([path], ("text",), max_document_bytes=7)
    assert [document.texts for document in reader] == [("abcd",), ("abc",)]


def test_text_is_mended_on_request(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"text": "caf\u00c3\u00a9 \u201cquoted\u201d"}))
    reader = CorpusReader([path], ("text",), mend_text=True)
    assert [document.texts for document in reader] == [('caf\u00e9 "quoted"',)]


def test_values_that_only_pythons_parser_reads_are_accepted(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a.jsonl", '{"text": "one", "score": NaN, "id": 1' + "0" * 40 + "}")) == [
        ("one",)
    ]


def test_a_sample_comes_from_files_all_over_the_corpus(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / f"{i}.jsonl", '{"bad": 1}', *[f'{{"text": "{i} {j}"}}' for j in range(3)])
        for i in range(9)
    ]
    assert sample_texts(paths, ("text",)) == [f"{i} {j}" for i in (0, 3, 6) for j in range(3)]
    long = write(tmp_path / "long.txt", "x" * 100_000)
    assert [len(text) for text in sample_texts([long], ("text",))] == [4_000]


@pytest.mark.parametrize("name", ["data_0.dat", "data_0.dat.zst", "data_0.dat.gz"])
def test_records_of_lm_dataformat_are_documents(tmp_path: Path, name: str) -> None:
    records = b"".join(
        b"%016d" % len(text.encode()) + text.encode() for text in ("one", "", "zw\u00f6lf\n\n3")
    )
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(records))
    documents = list(CorpusReader([tmp_path / name], ("text",)))
    assert [document.texts for document in documents] == [("one",), ("",), ("zw\u00f6lf\n\n3",)]
    assert [document.offset for document in documents] == [16, 35, 51]


@pytest.mark.parametrize(
    ("data", "message"), [(b"%016d" % 9 + b"short", "within record 1"), (b"12", "no length")]
)
def test_a_damaged_record_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.dat").write_bytes(data)
    with refused(CorpusError, message):
        texts(tmp_path / "a.dat")


LONG = "first line\nsecond line\nthe third line has \u4f60\u597d words\n" + "x" * 45


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.dat"])
def test_long_documents_are_cut_on_request(tmp_path: Path, name: str) -> None:
    data = {
        "a.txt": LONG.encode(),
        "a.jsonl": json.dumps({"text": LONG}).encode() + b'\n{"text": "next"}\n',
        "a.dat": b"%016d" % len(LONG.encode()) + LONG.encode(),
    }[name]
    (tmp_path / name).write_bytes(data)
    reader = CorpusReader([tmp_path / name], ("text",), max_document_bytes=24, split_long=True)
    parts = [document.texts[0] for document in reader]
    if name == "a.jsonl":
        assert parts.pop() == "next"
    assert "".join(parts) == LONG
    assert all(len(part.encode()) <= 24 for part in parts)
    assert parts[:2] == ["first line\nsecond line\n", "the third line has "]
    assert reader.num_too_long == 1


def test_the_longer_text_of_two_decides_how_many_parts_there_are(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"a": "one two three four", "b": "short"}) + "\n")
    reader = CorpusReader([tmp_path / "a.jsonl"], ("a", "b"), max_document_bytes=10, split_long=True)
    assert [document.texts for document in reader] == [("one two ", "short"), ("three four", "")]


@pytest.mark.parametrize("most_bytes", [1, 2, 3, 4, 8])
def test_characters_are_never_cut(tmp_path: Path, most_bytes: int) -> None:
    (tmp_path / "a.txt").write_text("\u4f60\u597d\U0001f680" * 20)
    reader = CorpusReader([tmp_path / "a.txt"], ("text",), max_document_bytes=most_bytes, split_long=True)
    assert "".join(document.texts[0] for document in reader) == "\u4f60\u597d\U0001f680" * 20
