import io
import json
import os
import resource
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from neox_data.indexed import open_indexed
from neox_data.preprocess.cli import main
from neox_data.tokenizers import build_tokenizer
from support.refusals import shows

TEXTS = ["first document", "", "caf\u00e9 \u4f60\u597d", "def f():\n    return 1\n"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text, "title": text[:5]}) + "\n" for text in TEXTS))
    return path


def run(*arguments: object, output: Path) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments), "--output-prefix", str(output)])


def test_documents_are_written_in_order(corpus: Path, tokenizer_json: Path, tmp_path: Path) -> None:
    output = tmp_path / "out" / "set"
    result = run(
        "--input", corpus, "--tokenizer-type", "HFTokenizer", "--vocab-file", tokenizer_json, "--append-eod",
        "--dataset-impl", "mmap", "--num-docs", 4, "--log-interval", 1, output=output,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    dataset = open_indexed(f"{output}_text_document")
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=tokenizer_json)
    expected = [[*tokenizer.encode(text), tokenizer.end_of_document] for text in TEXTS if text]
    assert [row.tolist() for row in dataset] == expected
    assert dataset.document_starts.tolist() == [0, 1, 2, 3]
    per_token = sum(map(len, TEXTS)) / dataset.num_tokens
    size = corpus.stat().st_size
    sentence = f"{size} bytes -> {dataset.num_tokens:,} tokens ({per_token:.2f} characters per token) in "
    assert f"4 documents, {sentence}" in result.stdout
    assert "MB/s" not in result.stdout
    assert "1 document without" in result.stdout
    assert f"wrote {output}_text_document.bin and {output}_text_document.idx" in result.stdout
    assert "4 documents (100%)" in result.stderr


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_second_run_replaces_the_dataset(
    corpus: Path, tokenizer_json: Path, tmp_path: Path, resume: list[str]
) -> None:
    words = ("--input", corpus, "--tokenizer-type", "HFTokenizer", "--vocab-file", tokenizer_json, *resume)
    first = run(*words, output=tmp_path / "a")
    assert first.exit_code == 0, first.output
    tokens = open_indexed(f"{tmp_path}/a_text_document").num_tokens
    corpus.write_text(json.dumps({"text": TEXTS[0]}))
    again = run(*words, output=tmp_path / "a")
    assert again.exit_code == 0, again.output
    assert open_indexed(f"{tmp_path}/a_text_document").num_tokens < tokens


def test_the_vocabulary_may_be_given_as_in_the_readme_of_gpt_neox(
    corpus: Path, tokenizer_json: Path, tmp_path: Path
) -> None:
    result = run(
        "--input", corpus, "--tokenizer-type", "HFTokenizer", "--vocab", tokenizer_json, output=tmp_path / "a"
    )
    assert result.exit_code == 0, result.output
    assert open_indexed(f"{tmp_path}/a_text_document").num_tokens


def test_the_number_of_workers_changes_nothing(tmp_path: Path, tokenizer_json: Path) -> None:
    lines = [json.dumps({"text": f"{i} " + TEXTS[i % 4] * (i % 120)}) + "\n" for i in range(3000)]
    (tmp_path / "corpus.jsonl").write_text("".join(lines))
    outputs = []
    for workers in (1, 2, 5):
        result = run(
            "--input", tmp_path / "corpus.jsonl", "--tokenizer-type", "HFTokenizer",
            "--vocab-file", tokenizer_json,
            "--append-eod", "--workers", workers, output=tmp_path / str(workers),
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        outputs.append(
            [Path(f"{tmp_path}/{workers}_text_document.{end}").read_bytes() for end in ("bin", "idx")]
        )
    assert outputs[0] == outputs[1] == outputs[2]


def test_gigatoken_and_the_tokenizers_library_write_the_same_files(
    corpus: Path, tokenizer_json: Path, tmp_path: Path
) -> None:
    lines = [json.dumps({"text": f"{i} " + TEXTS[i % 4] * (i % 40)}) + "\n" for i in range(2000)]
    corpus.write_text("".join(lines))
    files = []
    for flags, encoder in (((), "gigatoken"), (("--exact",), "HFTokenizer (--exact)")):
        output = tmp_path / encoder[:2]
        result = run(
            "--input", corpus, "--tokenizer-type", "HFTokenizer", "--vocab-file", tokenizer_json,
            "--append-eod", *flags, output=output,
        )  # fmt: skip
        assert f"encoded by {encoder}\n" in result.stdout
        files.append([Path(f"{output}_text_document.{end}").read_bytes() for end in ("bin", "idx")])
    assert files[0] == files[1]


def test_reason_why_gigatoken_is_not_used_is_shown(corpus: Path, tmp_path: Path) -> None:
    result = run("--input", corpus, "--tokenizer-type", "CharLevelTokenizer", output=tmp_path / "set")
    assert shows(result.stdout, "CharLevelTokenizer", "CharLevelTokenizer")


def test_long_documents_are_counted(corpus: Path, tmp_path: Path) -> None:
    result = run(
        "--input", corpus, "--tokenizer-type", "CharLevelTokenizer", "--max-document-bytes", 45,
        output=tmp_path / "set",
    )  # fmt: skip
    assert shows(result.stdout, "2 documents", "--max-document-bytes")
    assert len(open_indexed(tmp_path / "set_text_document")) == 1


def test_several_inputs_and_keys(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("more")
    result = run(
        "--input", corpus, tmp_path / "more.txt", "--jsonl-keys", "title", "--jsonl-keys", "text",
        "--tokenizer-type", "CharLevelTokenizer", output=tmp_path / "set",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = {
        key: [bytes(row.tolist()) for row in open_indexed(tmp_path / f"set_{key}_document")]
        for key in ("text", "title")
    }
    assert rows["text"] == [text.encode() for text in TEXTS if text] + [b"more"]
    assert rows["title"] == [text[:5].encode() for text in TEXTS if text] + [b"more"]


def test_a_broken_line_is_named_and_leaves_nothing(corpus: Path, tmp_path: Path) -> None:
    with corpus.open("a") as file:
        file.write('{"text": "cut\n')
    output = tmp_path / "out" / "set"
    result = run("--input", corpus, "--tokenizer-type", "CharLevelTokenizer", output=output)
    assert result.exit_code == 2
    assert shows(result.stderr, corpus, "line 5", "JSON")
    assert list(output.parent.iterdir()) == []


def test_broken_lines_are_skipped_and_counted_on_request(corpus: Path, tmp_path: Path) -> None:
    with corpus.open("a") as file:
        file.write('{"text": "cut\n{"other": 1}\n')
    result = run(
        "--input", corpus, "--tokenizer-type", "CharLevelTokenizer", "--skip-bad-lines", output=tmp_path / "s"
    )
    assert result.exit_code == 0
    assert shows(result.stdout, "2 unreadable", corpus, "line 5")
    assert shows(result.stdout, corpus, "line 6", "'text'")
    assert len(open_indexed(tmp_path / "s_text_document")) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--input", "nowhere.jsonl", "--tokenizer-type", "CharLevelTokenizer"),
            "nowhere.jsonl does not exist"),
        (("--input", "CORPUS", "--tokenizer-type", "HFTokenizer"),
            "HFTokenizer: vocab_file is not given; give the path of tokenizer.json\n"),
        (("--input", "CORPUS", "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "/vocab_file"),
            "GPT2BPETokenizer: vocab_file /vocab_file is not a file; give the path of vocab.json, and"),
        (("--input", "CORPUS", "--tokenizer-type", "CharLevelTokenizer", "--jsonl-keys", "body"),
            "no key 'body'; its keys are"),
        (("--input", "CORPUS", "--tokenizer-type", "GPT5"), "'GPT5' is not one of"),
        (("--tokenizer-type", "CharLevelTokenizer"), "Missing option '--input'"),
        (("--input", "CORPUS", "--tokenizer-type", "CharLevelTokenizer", "--dataset-impl", "lazy"),
            "Invalid value for '--dataset-impl': 'lazy' is not 'mmap'."),
        (("--tokenizer-type", "CharLevelTokenizer", "--input", ""),
            "--input contains an empty name; pass a file"),
    ],
)  # fmt: skip
def test_a_wrong_request_has_one_sentence_and_exit_code_2(
    corpus: Path, tmp_path: Path, arguments, sentence: str
) -> None:
    words = [corpus if word == "CORPUS" else word for word in arguments]
    result = run(*words, output=tmp_path / "set")
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.output
    assert not list(tmp_path.glob("set*"))


@pytest.mark.parametrize("prefix", ["", "out/"])
def test_an_output_without_a_name_is_refused(corpus: Path, prefix: str) -> None:
    result = run("--input", corpus, "--tokenizer-type", "CharLevelTokenizer", output=prefix)
    assert result.exit_code == 2
    assert f"--output-prefix '{prefix}' contains" in result.stderr


def test_a_corpus_without_text_makes_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    result = run(
        "--input", tmp_path / "empty.jsonl", "--tokenizer-type", "CharLevelTokenizer", output=tmp_path / "set"
    )
    assert result.exit_code == 2
    assert shows(result.stderr, "empty.jsonl", "'text'", "--jsonl-keys")
    assert not list(tmp_path.glob("*set*"))


def test_an_output_that_cannot_be_written_is_named(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run(
        "--input", corpus, "--tokenizer-type", "CharLevelTokenizer", output=tmp_path / "file" / "set"
    )
    assert result.exit_code == 1
    assert f"Error: {tmp_path}/file: " in result.stderr


def test_h_is_help(tmp_path: Path) -> None:
    assert run("-h", output=tmp_path).stdout == run("--help", output=tmp_path).stdout


@pytest.mark.parametrize("flags", [(), ("--resume",)])
def test_an_output_that_finds_no_room_is_named_and_leaves_nothing_half_written(
    corpus: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    corpus.write_text("".join(json.dumps({"text": "some words " * 30}) + "\n" for _ in range(1000)))
    done = subprocess.run(
        [
            sys.executable, "-m", "neox_data.preprocess", "--input", corpus,
            "--tokenizer-type", "CharLevelTokenizer", "--output-prefix", tmp_path / "o" / "set", *flags,
        ],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"Error: {tmp_path}/o/set" in done.stderr
    assert done.stderr.endswith("_text_document.bin: File too large; free disk space\n")
    assert [path for path in (tmp_path / "o").rglob("*") if path.is_file()] == []


def test_files_that_are_not_read_or_have_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": null}\n')
    (tmp_path / "in" / "b.txt").write_text("text")
    (tmp_path / "in" / "c.csv").write_text("text")
    for flags in ((), ("--resume",)):
        result = run(
            "--input", tmp_path / "in", "--tokenizer-type", "CharLevelTokenizer", *flags,
            output=tmp_path / "set",
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        assert shows(result.stdout, "1 file", f"{tmp_path}/in/c.csv")
        assert "1 document has" in result.stdout
        assert shows(result.stdout, "1 file", f"{tmp_path}/in/a.jsonl")
        counts = json.loads((tmp_path / "set_text_document.manifest.json").read_text())["counts"]
        assert (counts["null"], counts["passed_over"], counts["documents"]) == (1, 1, 1)


def test_missing_text_names_what_was_not_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").touch()
    (tmp_path / "in" / "c.csv").touch()
    for flags in ((), ("--resume",)):
        result = run(
            "--input", tmp_path / "in", "--tokenizer-type", "CharLevelTokenizer", *flags,
            output=tmp_path / "set",
        )  # fmt: skip
        assert result.exit_code == 2
        assert shows(result.stderr, "1 file", f"{tmp_path}/in/c.csv")


@pytest.mark.parametrize("append_eod", [True, False])
@pytest.mark.parametrize("resume", [True, False])
def test_datasets_of_several_keys_have_the_same_documents(
    tmp_path: Path, append_eod: bool, resume: bool
) -> None:
    rows = [("a", "1"), ("", "2"), ("c", None), ("", ""), ("e", "5")]
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": text, "title": title}) + "\n" for text, title in rows)
    )
    flags = [*["--append-eod"] * append_eod, *["--resume"] * resume]
    result = run(
        "--input", tmp_path / "corpus.jsonl", "--json-keys", "text", "--json-keys", "title",
        "--tokenizer-type", "CharLevelTokenizer", *flags, output=tmp_path / "set",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    end = b"\0" if append_eod else b""
    for key, texts in (("text", (b"a", b"", b"c", b"e")), ("title", (b"1", b"2", b"", b"5"))):
        dataset = open_indexed(tmp_path / f"set_{key}_document")
        assert [bytes(row.tolist()) for row in dataset] == [text + end for text in texts]


def test_a_key_whose_texts_are_all_empty_makes_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": "a", "title": ""}\n')
    result = run(
        "--input", tmp_path / "corpus.jsonl", "--jsonl-keys", "text", "--jsonl-keys", "title", "--append-eod",
        "--tokenizer-type", "CharLevelTokenizer", output=tmp_path / "set",
    )  # fmt: skip
    assert result.exit_code == 2
    assert "text under 'title'" in result.stderr


def test_missing_end_of_document_tokens_are_noted(corpus: Path, tmp_path: Path) -> None:
    words = ("--input", corpus, "--tokenizer-type", "CharLevelTokenizer")
    note = "note: without --append-eod nothing separates the documents"
    assert note in run(*words, output=tmp_path / "set").stderr
    assert note not in run(*words, "--append-eod", output=tmp_path / "set").stderr
    words = ("--input", corpus, "--tokenizer-type", "GPT2BPETokenizer")
    refused = run(*words, output=tmp_path / "other").stderr
    assert "vocab_file is not" in refused
    assert note not in refused


def test_wrong_key_names_the_option(corpus: Path, tmp_path: Path) -> None:
    result = run(
        "--input", corpus, "--tokenizer-type", "CharLevelTokenizer", "--jsonl-keys", "body",
        output=tmp_path / "set",
    )  # fmt: skip
    assert shows(result.stderr, "'body'", "'text', 'title'", "--jsonl-keys")


def test_a_member_whose_name_is_not_utf8_is_named_with_escapes(tmp_path: Path) -> None:
    content = b'{"text": "one"}\n'
    with tarfile.open(tmp_path / "in.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        for name in ("a.jsonl", os.fsdecode(b"\xff.bin")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    result = run(
        "--input", tmp_path / "in.tar", "--tokenizer-type", "CharLevelTokenizer", output=tmp_path / "o"
    )
    assert result.exit_code == 0, result.output
    assert f"  {tmp_path}/in.tar, \\udcff.bin\n" in result.stdout
