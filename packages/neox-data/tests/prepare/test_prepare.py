"""`neox-data prepare`: from files and folders of texts to a tokenizer and a dataset."""

import gzip
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner

from neox_data.cli import main
from neox_data.errors import DataError
from neox_data.indexed import open_indexed
from neox_data.preprocess.inputs import ENDINGS
from neox_data.tokenizers import build_tokenizer
from support.refusals import shows

SENTENCE = "The quick brown fox jumps over the lazy dog, again and again.\n"


def prepare(*arguments):
    return CliRunner().invoke(main, ["prepare", *map(str, arguments)])


def result_in(folder: Path):
    return json.loads((folder / "prepared.json").read_text())


def documents_in(folder: Path):
    return [json.loads(line)["text"] for line in (folder / "corpus.jsonl").read_text().splitlines()]


def decoded(folder: Path):
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=folder / "tokenizer.json")
    dataset = open_indexed(folder / "data" / "corpus_text_document")
    return [tokenizer.decode(dataset[number][:-1].tolist()) for number in range(len(dataset))]


def test_all_kinds_of_files_become_one_dataset_and_others_are_counted(tmp_path):
    texts, output = tmp_path / "my texts", tmp_path / "the run"
    (texts / "sub").mkdir(parents=True)
    (texts / "one.txt").write_bytes(b"first\r\n" * 3)
    (texts / "two.md").write_text("# second\n")
    (texts / "three.jsonl").write_text('{"text": "third"}\n{"other": 1}\n{"text": "fourth"}\n')
    (texts / "four.jsonl.gz").write_bytes(gzip.compress(b'{"text": "fifth"}\n'))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["sixth", " "]}), texts / "sub" / "five.parquet")
    (texts / "sub" / "loop").symlink_to(texts, target_is_directory=True)
    (texts / "again.txt").symlink_to(texts / "one.txt")
    (texts / "dead.txt").symlink_to("nowhere")
    (texts / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (texts / "binary.txt").write_bytes(b"a\0b")
    (texts / "empty.txt").write_bytes(b"")
    (texts / "program").write_bytes(b"\x7fELF")
    (texts / ".hidden.txt").write_text("hidden")
    os.mkfifo(texts / "pipe.txt")
    found = prepare("--input", texts, "--output", output)
    assert found.exit_code == 0, found.output
    expected = {"first\nfirst\nfirst\n", "# second\n", "third", "fourth", "fifth", "sixth"}
    assert set(documents_in(output)) == set(decoded(output)) == expected
    assert result_in(output)["skipped"] == {
        "the same file as another one": 1,
        "cannot be read (No such file or directory)": 1,
        "files that cannot be read as text": 1,
        "lines or other parts of files that cannot be read as text": 1,
        "binary": 1,
        "the file is empty": 1,
        "blank": 1,
        "the file type is not supported": 1,
        "hidden": 1,
        "not a regular file": 1,
        "a link to a folder": 1,
    }
    assert (result_in(output)["files"], result_in(output)["documents"]) == (7, 6)
    assert shows(found.output, "three.jsonl", "line 2", "'text'")
    assert shows(found.output, "latin.txt", "UTF-8", "0xe9")


def test_lines_without_the_key_are_counted_apart_from_files_and_name_the_keys(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "good.txt").write_text(SENTENCE)
    (tmp_path / "texts" / "other.txt").write_bytes(b"\xff")
    (tmp_path / "texts" / "lines.jsonl").write_text('{"content": "words", "id": 1}\n' * 300)
    found = prepare("--input", tmp_path / "texts", "--output", tmp_path / "run")
    assert "skipped 1" in found.output
    assert "skipped 300" in found.output
    assert shows(found.output, "lines.jsonl", "line 1", "'text'")


def test_an_empty_file_is_said_to_be_empty(tmp_path):
    (tmp_path / "empty.txt").touch()
    found = prepare("--input", tmp_path / "empty.txt", "--output", tmp_path / "run")
    assert found.exit_code == 2
    assert shows(found.output, tmp_path / "empty.txt", "is empty")


def test_of_many_files_that_are_left_out_the_first_are_named(tmp_path):
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.csv", "c.csv", "d.csv", "e.csv", "f.csv"):
        (tmp_path / "texts" / name).write_text(SENTENCE)
    found = prepare("--input", tmp_path / "texts", "--output", tmp_path / "run")
    names = ", ".join(f"{tmp_path}/texts/{name}.csv" for name in "bcd")
    assert shows(found.output, "skipped 5", names, "2 more")


def test_a_damaged_archive_is_reported(tmp_path):
    (tmp_path / "good.txt").write_text(SENTENCE * 100)
    file = tmp_path / "cut.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps({"text": SENTENCE * 100}).encode())[:-5])
    found = prepare("--input", tmp_path, "--output", tmp_path / "run")
    assert found.exit_code == 2
    assert found.stderr.startswith(f"Error: {file} is damaged or truncated (")
    assert list((tmp_path / "run").iterdir()) == []


def test_one_long_text_is_cut_so_that_a_twentieth_is_for_validation(tmp_path):
    text = "".join(f"{number}: {SENTENCE}" for number in range(4000))
    (tmp_path / "book.txt").write_text(text)
    found = prepare("--input", tmp_path / "book.txt", "--output", tmp_path / "run")
    result = result_in(tmp_path / "run")
    documents = documents_in(tmp_path / "run")
    assert (result["documents"], result["cut"], result["written"]) == (1, 1, len(documents))
    assert 100 <= len(documents) <= 110
    assert all(document.endswith("\n") and len(document) <= len(text) // 100 for document in documents)
    # Nothing is lost: in their order, the parts are the text.
    assert "".join(sorted(documents, key=lambda part: int(part.split(":")[0]))) == text
    assert documents != sorted(documents, key=lambda part: int(part.split(":")[0]))
    tokens = result["tokens"]
    assert result["split"] == f"{len(documents) - 5},5,0"
    assert 0.03 < tokens["valid"] / (tokens["train"] + tokens["valid"]) < 0.07
    assert sum(tokens.values()) == open_indexed(result["data_path"]).num_tokens
    assert "1 document was" in found.output


def test_one_line_without_an_end_is_cut_within_words(tmp_path):
    (tmp_path / "line.txt").write_text("\xe4" * 10_000)
    prepare("--input", tmp_path / "line.txt", "--output", tmp_path / "run")
    documents = documents_in(tmp_path / "run")
    assert "".join(documents) == "\xe4" * 10_000
    assert max(len(document.encode()) for document in documents) == 2048


def test_the_order_is_the_same_on_every_machine(tmp_path):
    (tmp_path / "lines.jsonl").write_text("".join(f'{{"text": "{number}"}}\n' for number in range(8)))
    prepare("--input", tmp_path / "lines.jsonl", "--output", tmp_path / "run")
    assert documents_in(tmp_path / "run") == ["6", "2", "4", "0", "5", "3", "7", "1"]
    assert result_in(tmp_path / "run")["split"] == "7,1,0"


def test_too_few_documents_have_no_validation(tmp_path):
    (tmp_path / "few.txt").write_text("Some words.\n")
    found = prepare("--input", tmp_path / "few.txt", "--output", tmp_path / "run")
    assert result_in(tmp_path / "run")["split"] == "1,0,0"
    assert "least 5 documents" in found.output


def test_a_second_run_repeats_no_completed_step(tmp_path):
    (tmp_path / "book.txt").write_text(SENTENCE * 500)
    arguments = ("--input", tmp_path / "book.txt", "--output", tmp_path / "run")
    prepare(*arguments)
    names = ("corpus.jsonl", "tokenizer.json", "data/corpus_text_document.bin")
    before = {name: (tmp_path / "run" / name).stat().st_mtime_ns for name in names}
    first = result_in(tmp_path / "run")
    # As if the run had been killed after its second step.
    for lost in ("prepared.json", "data/corpus_text_document.manifest.json"):
        (tmp_path / "run" / lost).unlink()
    (tmp_path / "run" / ".corpus.jsonl.unsorted").write_text("left by a killed process")
    again = prepare(*arguments)
    assert again.exit_code == 0
    assert again.output.count("complete since") == 2
    assert result_in(tmp_path / "run") == first
    now = {name: (tmp_path / "run" / name).stat().st_mtime_ns for name in names}
    assert [name for name in names if now[name] != before[name]] == ["data/corpus_text_document.bin"]


@pytest.mark.parametrize("lost", ["bin", "idx", "half of bin", "tokenizer", "corpus"])
def test_what_is_missing_of_a_result_is_written_again(tmp_path, lost):
    texts, run = tmp_path / "texts", tmp_path / "run"
    texts.mkdir()
    for number in range(20):
        (texts / f"{number}.txt").write_text(f"{number}: {SENTENCE}")
    prepare("--input", texts, "--output", run)
    file = {
        "bin": run / "data" / "corpus_text_document.bin",
        "idx": run / "data" / "corpus_text_document.idx",
        "half of bin": run / "data" / "corpus_text_document.bin",
        "tokenizer": run / "tokenizer.json",
        "corpus": run / "corpus.jsonl",
    }[lost]
    whole = {path: path.read_bytes() for path in run.rglob("*.*") if path.suffix != ".json" or path == file}
    if lost == "half of bin":
        os.truncate(file, len(whole[file]) // 2)
    else:
        file.unlink()
    again = prepare("--input", texts, "--output", run)
    assert again.exit_code == 0, again.output
    assert {path: path.read_bytes() for path in whole} == whole
    assert again.output.count("complete since") == 2


def test_an_empty_path_is_refused_and_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text(SENTENCE * 500)
    found = prepare("--input", "", "--output", "run")
    assert (found.exit_code, "--input is empty; give a path" in found.output) == (2, True)
    assert os.listdir(tmp_path) == ["book.txt"]
    found = prepare("--input", ".", "--input", "book.txt", "--output", "run")
    assert shows(found.output.splitlines()[0], "1", "book.txt")


def test_a_replaced_tokenizer_is_answered_with_what_works_here(tmp_path):
    (tmp_path / "book.txt").write_text(SENTENCE * 500)
    run, arguments = tmp_path / "run", ("--input", tmp_path / "book.txt", "--output", tmp_path / "run")
    prepare(*arguments)
    tokenizer = run / "tokenizer.json"
    whole = tokenizer.read_text()
    tokenizer.write_text(whole.replace("<|padding|>", "<|filling|>"))
    found = prepare(*arguments)
    assert found.exit_code == 2
    assert found.output.endswith(
        f"; restore {tokenizer}, which models trained on this data require, or delete {run}/data to tokenize "
        "the texts again\n"
    )
    tokenizer.write_text(whole)
    assert prepare(*arguments).exit_code == 0


@pytest.mark.parametrize("change", ["the file", "the vocabulary"])
def test_the_result_of_other_texts_or_options_is_not_overwritten(tmp_path, change):
    (tmp_path / "book.txt").write_text(SENTENCE * 500)
    prepare("--input", tmp_path / "book.txt", "--output", tmp_path / "run")
    before = (tmp_path / "run" / "corpus.jsonl").read_bytes()
    options = ["--vocab-size", 300] if change == "the vocabulary" else []
    if change == "the file":
        (tmp_path / "book.txt").write_text(SENTENCE * 501)
    found = prepare("--input", tmp_path / "book.txt", "--output", tmp_path / "run", *options)
    assert found.exit_code == 3
    assert shows(found.stderr, tmp_path / "run", "other texts", "--output")
    assert (tmp_path / "run" / "corpus.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["corpus.jsonl", "tokenizer.json", "data/corpus_text_document.idx"])
def test_files_that_prepare_did_not_write_are_not_taken_for_its_own(tmp_path, name):
    (tmp_path / "book.txt").write_text(SENTENCE * 100)
    strange = tmp_path / "run" / name
    strange.parent.mkdir(parents=True)
    strange.write_text("other")
    found = prepare("--input", tmp_path / "book.txt", "--output", tmp_path / "run")
    assert found.exit_code == 2
    assert shows(found.output, f"{strange} exists", "corpus.json")
    assert strange.read_text() == "other"


def test_a_given_file_that_is_no_tokenizer_blocks_no_corrected_command(tmp_path):
    (tmp_path / "book.txt").write_text(SENTENCE * 100)
    arguments = ("--input", tmp_path / "book.txt", "--output", tmp_path / "run")
    wrong = tmp_path / "tokenizer_config.json"
    wrong.write_text('{"tokenizer_class": "GPTNeoXTokenizer"}')
    found = prepare(*arguments, "--vocab-file", wrong)
    assert found.exit_code == 2
    assert "reading 1 file" not in found.output
    assert not (tmp_path / "run").exists()
    assert prepare(*arguments).exit_code == 0


def test_a_given_tokenizer_is_used(tmp_path):
    (tmp_path / "book.txt").write_text(SENTENCE * 100)
    prepare("--input", tmp_path / "book.txt", "--output", tmp_path / "one", "--vocab-size", 270)
    file = tmp_path / "one" / "tokenizer.json"
    prepare("--input", tmp_path / "book.txt", "--output", tmp_path / "two", "--vocab-file", file)
    assert result_in(tmp_path / "two")["vocab_file"] == str(file)
    assert result_in(tmp_path / "two")["entries"] == 270
    assert not (tmp_path / "two" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no file with text; pass a folder with files of a supported type: .jsonl, .json, .txt, "),
        ({"program": b"\x7fELF"}, "skipped 1: the file type is not supported"),
        (
            {"blank.txt": b" \n"},
            "pass other files, or the key of the text with --jsonl-key\n",
        ),
        (
            {"bad.txt": b"\xff"},
            "pass other files, or the key of the text with --jsonl-key\n",
        ),
        (
            {"chats.jsonl": b'{"messages": []}\n'},
            "key of the text with --jsonl-key\n"
            "  skipped 1: lines or other parts of files that cannot be read as text: {}/chats.jsonl, line 1: "
            "no key 'text'; its keys are 'messages'",
        ),
    ],
)
def test_a_folder_without_texts_is_refused_with_the_reason(tmp_path, content, message):
    texts = tmp_path / "texts"
    texts.mkdir()
    for name, data in (content or {}).items():
        (texts / name).write_bytes(data)
    found = prepare("--input", texts, "--output", tmp_path / "run")
    assert found.exit_code == 2
    assert message.format(texts) in found.output
    assert list((tmp_path / "run").iterdir()) == []


def test_a_given_file_of_another_type_is_refused_with_the_supported_types(tmp_path):
    file = tmp_path / "picture.png"
    file.write_bytes(b"\x89PNG")
    found = prepare("--input", file, "--output", tmp_path / "run")
    assert found.exit_code == 2
    assert shows(found.output, file, ENDINGS)


def test_a_failure_leaves_folders_that_existed_and_complete_steps(tmp_path, monkeypatch):
    (tmp_path / "blank.txt").write_text(" ")
    (tmp_path / "book.txt").write_text(SENTENCE * 100)
    (tmp_path / "run").mkdir()
    assert prepare("--input", tmp_path / "blank.txt", "--output", tmp_path / "run").exit_code == 2
    assert list((tmp_path / "run").iterdir()) == []

    def fail(*arguments, **options):
        raise DataError("no tokenizer")

    monkeypatch.setattr("neox_data.prepare.run.train_byte_level_bpe", fail)
    found = prepare("--input", tmp_path / "book.txt", "--output", tmp_path / "new")
    assert (found.exit_code, "no tokenizer" in found.output) == (2, True)
    assert (tmp_path / "new" / "corpus.jsonl").exists()


@pytest.mark.parametrize("output", ["/proc/here", "/proc", "{}/file/deep/run"])
def test_an_output_that_cannot_be_made_is_refused_before_texts_are_read(tmp_path, output):
    (tmp_path / "file").write_text(SENTENCE)
    output = output.format(tmp_path)
    found = prepare("--input", tmp_path / "file", "--output", output)
    assert found.exit_code in (1, 2)
    assert re.fullmatch(rf"Error: {output}[/.\w]*: [\w ]+.*\n", found.output)
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_without_room_is_named_and_leaves_nothing_behind(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in "abcde":
        (texts / f"{name}.txt").write_text(SENTENCE * 2_000)
    done = subprocess.run(
        [sys.executable, "-m", "neox_data", "prepare", "--input", texts, "--output", tmp_path / "run"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert shows(done.stderr, tmp_path / "run" / "corpus.jsonl", "File too large", "free disk space")
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    ("size", "message"),
    [("257", "257 is not in the range 258<=x<=16777216."), ("4k", "'4k' is not a valid integer range.")],
)
def test_a_vocabulary_without_all_bytes_is_refused_before_texts_are_read(tmp_path, size, message):
    found = prepare("--input", tmp_path / "absent", "--output", tmp_path / "run", "--vocab-size", size)
    assert found.exit_code == 2
    assert found.output.endswith(f"Error: Invalid value for '--vocab-size': {message}\n")


def test_a_name_that_cannot_be_read_is_refused(tmp_path):
    found = prepare("--input", tmp_path / "absent", "--output", tmp_path / "run")
    assert found.exit_code == 2
    assert "absent: cannot" in found.output


def test_the_output_folder_is_not_an_input(tmp_path):
    (tmp_path / "book.txt").write_text(SENTENCE * 100)
    for _ in range(2):
        found = prepare("--input", tmp_path, "--output", tmp_path / "run")
        assert found.exit_code == 0, found.output
    assert result_in(tmp_path / "run")["files"] == 1


def test_the_result_of_an_earlier_run_within_the_folder_is_not_read_as_texts(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "book.txt").write_text(SENTENCE * 10)
    assert prepare("--input", texts, "--output", texts / "run").exit_code == 0
    # What a run writes there.
    (texts / "run" / "metrics.jsonl").write_text('{"text": "a metric"}\n')
    (texts / "run" / "checkpoints").mkdir()
    (texts / "run" / "checkpoints" / "notes.txt").write_text("a checkpoint")
    # A folder of texts may contain a file of this name.
    (texts / "more").mkdir()
    (texts / "more" / "corpus.json").write_text('{"text": "other words"}')
    found = prepare("--input", texts, "--output", tmp_path / "run2")
    assert found.exit_code == 0, found.output
    assert shows(found.output, "skipped 1", f"{texts}/run")
    assert sorted(documents_in(tmp_path / "run2")) == sorted([SENTENCE * 10, "other words"])
    # A file that is named is read.
    named = prepare("--input", texts / "run" / "corpus.jsonl", "--output", tmp_path / "run3")
    assert named.exit_code == 0, named.output
    assert documents_in(tmp_path / "run3") == [SENTENCE * 10]


def test_the_folder_of_the_texts_is_not_that_of_the_result(tmp_path):
    (tmp_path / "book.txt").write_text(SENTENCE * 10)
    found = prepare("--input", tmp_path, "--output", tmp_path)
    assert found.exit_code == 2
    assert shows(found.output, tmp_path, "--output", f"{tmp_path}/run")
    assert os.listdir(tmp_path) == ["book.txt"]


def test_a_result_is_not_taken_for_a_folder_of_texts(tmp_path):
    (tmp_path / "book.txt").write_text(SENTENCE * 100)
    prepare("--input", tmp_path / "book.txt", "--output", tmp_path / "run")
    found = prepare("--input", tmp_path / "run", "--output", tmp_path / "run2")
    assert found.exit_code == 2
    assert f"{tmp_path}/run is the" in found.output
    assert list((tmp_path / "run2").iterdir()) == []


def test_a_result_is_not_counted_as_texts(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "book.txt").write_text(SENTENCE * 100)
    assert prepare("--input", texts, "--output", texts / "run").exit_code == 0
    counted = CliRunner().invoke(main, ["count", "--input", str(texts)])
    assert counted.exit_code == 0, counted.output
    assert f"{'documents':12} 1\n" in counted.stdout
    assert shows(counted.stderr, "1 file", texts / "run")
    refused = CliRunner().invoke(main, ["count", "--input", str(texts / "run")])
    assert refused.exit_code == 2
    assert f"{texts}/run is the" in refused.output
