import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from neox_data.cli import main
from neox_data.indexed import IndexedDatasetWriter, open_indexed
from neox_data.manifest import read_manifest
from neox_data.preprocess.cli import main as preprocess_main
from neox_data.sources import DocumentSources
from neox_data.tokenizers import build_tokenizer
from support.refusals import shows


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_inspect_shows_the_contents_of_a_dataset(write_dataset) -> None:
    prefix = write_dataset([[1, 2], [3], [4, 5, 6, 7, 8, 9]])
    result = run("inspect", prefix)
    assert result.exit_code == 0
    head, chart = result.stdout.split("\n\n")
    rows = dict(line.split(maxsplit=1) for line in head.splitlines() if "token type" not in line)
    assert rows == {
        "prefix": str(prefix),
        "layout": "mmap",
        "sequences": "3",
        "documents": "3",
        "tokens": "9",
        "lengths": "1 to 6, mean 3.0, median 2",
    }
    assert "token type   uint16" in head
    assert [line.split() for line in chart.splitlines()] == [
        ["tokens", "documents"],
        ["1", "1", "#" * 40],
        ["2", "to", "3", "1", "#" * 40],
        ["4", "to", "7", "1", "#" * 40],
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--vocab-size", 10**20], "is not in the range"),
        (["--special-token", "\udcff"], "write it in UTF-8"),
        ([], "the corpus has no text"),
    ],
)
def test_no_useless_tokenizer_is_trained(tmp_path: Path, words: list[object], text: str) -> None:
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    result = run(
        "train-tokenizer", "--input", tmp_path / "empty.jsonl", "--output", tmp_path / "t.json", *words
    )
    assert (result.exit_code, (tmp_path / "t.json").exists()) == (2, False)
    assert text in result.stderr


def test_inspect_shows_an_empty_dataset(write_dataset) -> None:
    assert "sequences    0" in run("inspect", write_dataset([])).stdout


def test_verify_passes_a_sound_dataset(write_dataset) -> None:
    result = run("verify", write_dataset([[1, 2], [3]]))
    assert result.exit_code == 0
    assert shows(result.stdout, "2 sequences", "3 tokens")


@pytest.fixture
def preprocessed(tmp_path: Path, tokenizer_json: Path):
    def make(name: str, *texts: str) -> str:
        source = tmp_path / f"{name}.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        words = ["--input", source, "--tokenizer-type", "HFTokenizer", "--vocab-file", tokenizer_json]
        result = CliRunner().invoke(
            preprocess_main, [*map(str, words), "--append-eod", "--output-prefix", str(tmp_path / name)]
        )
        assert result.exit_code == 0, result.output
        return f"{tmp_path}/{name}_text_document"

    return make


def test_verify_holds_the_files_against_the_manifest(preprocessed) -> None:
    prefix = preprocessed("one", "a text", "another")
    assert "2 sequences, " in (output := run("verify", prefix).stdout)
    assert "hashes match" in output
    data = bytearray(Path(f"{prefix}.bin").read_bytes())
    data[0] ^= 1
    Path(f"{prefix}.bin").write_bytes(data)
    result = run("verify", prefix)
    assert result.exit_code == 2
    assert shows(result.stderr, "one_text_document.bin", "one_text_document.manifest.json")


def test_inspect_decodes_the_first_documents(preprocessed, tokenizer_json: Path) -> None:
    prefix = preprocessed("one", "a text", "another", "third")
    result = run(
        "inspect", prefix, "--show", 2, "--tokenizer-type", "HFTokenizer", "--vocab-file", tokenizer_json
    )
    assert result.exit_code == 0, result.output
    shown = result.stdout.split("\ndocument 0, ")[1]
    assert "text<|endoftext|>\n\ndocument 1," in shown
    assert shown.endswith("tokens:\nanother<|endoftext|>\n")
    assert run("inspect", prefix, "--show", 2).exit_code == 2


def test_inspect_shows_which_tokens_of_labels_count(tmp_path: Path, tokenizer_json: Path) -> None:
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=tokenizer_json)
    a, b = tokenizer.encode("one two"), tokenizer.encode("three")
    rows = [[-100] * len(a) + b + [-100], [*a, -100, *b], [-100, -100], a]
    with IndexedDatasetWriter(tmp_path / "labels", dtype=np.int32) as writer:
        for row in rows:
            writer.append(np.array(row, np.int32))
    given = ("--tokenizer-type", "HFTokenizer", "--vocab-file", tokenizer_json)
    result = run("inspect", tmp_path / "labels", "--show", len(rows), *given)
    assert result.exit_code == 0, result.output
    shown = [part.partition("tokens:\n")[2].strip() for part in result.stdout.split("\ndocument ")[1:]]
    before = f"[{len(a)} tokens left out]"
    assert shown == [
        f"{before}three[1 token left out]",
        "one two[1 token left out]three",
        "[2 tokens left out]",
        "one two",
    ]


def test_inspect_refuses_to_decode_with_another_tokenizer(preprocessed) -> None:
    prefix = preprocessed("one", "a text")
    result = run("inspect", prefix, "--show", 1, "--tokenizer-type", "CharLevelTokenizer")
    assert result.exit_code == 2
    assert "(HFTokenizer, 300 entries" in result.stderr


def test_merge_equals_one_run_over_all_inputs(preprocessed, tmp_path: Path) -> None:
    one, two = preprocessed("one", "a text", "", "another"), preprocessed("two", "more", "text")
    both = preprocessed("both", "a text", "", "another", "more", "text")
    result = run("merge", f"{one}.idx", two, "--output", tmp_path / "merged")
    assert result.exit_code == 0, result.output
    for ending in ("bin", "idx"):
        assert (tmp_path / f"merged.{ending}").read_bytes() == Path(f"{both}.{ending}").read_bytes()
    assert "wrote" in result.stdout
    assert "4 sequences" in result.stdout
    merged, whole = (json.loads(Path(f"{p}.manifest.json").read_text()) for p in (f"{tmp_path}/merged", both))
    assert [Path(source["path"]).name for source in merged["inputs"]] == ["one.jsonl", "two.jsonl"]
    for part in ("tokenizer", "options", "counts", "files"):
        if part == "counts":
            merged[part].pop("bytes"), whole[part].pop("bytes")
        if part == "files":
            # The places in one file are others than those in two.
            merged[part].pop(".offsets"), whole[part].pop(".offsets")
        assert merged[part] == whole[part]
    assert "hashes match" in run("verify", tmp_path / "merged").stdout
    assert (
        merged["largest_token"]
        == whole["largest_token"]
        == max(token for row in open_indexed(tmp_path / "merged") for token in row.tolist())
    )


@pytest.mark.parametrize("ending", ["bin", "idx", "offsets"])
@pytest.mark.parametrize("command", ["merge", "split"])
def test_damaged_data_is_neither_copied_nor_certified(
    preprocessed, tmp_path: Path, command: str, ending: str
) -> None:
    prefix = preprocessed("one", "a text", "another", "a third")
    path = Path(f"{prefix}.{ending}")
    data = bytearray(path.read_bytes())
    # In the .idx: the mode bytes would be behind; this is the last number of the document index.
    data[-9 if ending == "idx" else 1] ^= 1
    path.write_bytes(data)
    (tmp_path / "out").mkdir()
    arguments = ("--split", "2,1") if command == "split" else ()
    result = run(command, prefix, *arguments, "--output", tmp_path / "out" / "new")
    assert result.exit_code == 2, result.output
    assert f"one_text_document.{ending} does not match" in result.stderr
    assert "manifest" in result.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_merge_compares_each_dataset_that_has_a_manifest(preprocessed, write_dataset, tmp_path: Path) -> None:
    prefix = preprocessed("one", "a text")
    path = Path(f"{prefix}.bin")
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    result = run("merge", write_dataset([[1, 2]]), prefix, "--output", tmp_path / "merged")
    assert result.exit_code == 2
    assert "one_text_document.bin does not" in result.stderr
    assert not list(tmp_path.glob("merged*"))


def test_merge_without_all_manifests_makes_none(preprocessed, write_dataset, tmp_path: Path) -> None:
    result = run(
        "merge", preprocessed("one", "a text"), write_dataset([[1, 2]]), "--output", tmp_path / "merged"
    )
    assert result.exit_code == 0
    assert "no manifest was" in result.stderr
    assert not (tmp_path / "merged.manifest.json").exists()


def test_split_writes_the_parts(write_dataset, tmp_path: Path) -> None:
    prefix = write_dataset([[i, i] for i in range(10)])
    result = run("split", prefix, "--split", "8,2", "--output", tmp_path / "part")
    assert result.exit_code == 0, result.output
    assert [row.tolist()[0] for row in open_indexed(tmp_path / "part_train")] == list(range(8))
    assert [row.tolist()[0] for row in open_indexed(tmp_path / "part_valid")] == [8, 9]
    assert not (tmp_path / "part_test.idx").exists()


def test_the_parts_of_a_split_know_their_sources_and_their_tokenizer(tmp_path: Path, preprocessed) -> None:
    names = [f"{tmp_path}/{name}_text_document" for name in ("one", "two")]
    preprocessed("one", "a", "", "b", "c")
    preprocessed("two", "d", "e", "f")
    assert run("merge", *names, "--output", tmp_path / "all").exit_code == 0
    assert run("split", tmp_path / "all", "--split", "4,2", "--output", tmp_path / "part").exit_code == 0
    for part, sources, counts in (
        ("train", ["one", "one", "one", "two"], [3, 1]),
        ("valid", ["two"] * 2, [2]),
    ):
        prefix = tmp_path / f"part_{part}"
        assert "hashes match" in run("verify", prefix).stdout
        manifest = read_manifest(prefix)
        assert [source["documents"] for source in manifest["inputs"]] == counts
        assert manifest["counts"] == {"documents": sum(counts), "tokens": open_indexed(prefix).num_tokens}
        found = [DocumentSources(prefix).source_of(number) for number in range(sum(counts))]
        assert [Path(source.path).stem for source in found] == sources
        lines = [Path(source.path).read_bytes()[source.offset :].splitlines()[0] for source in found]
        texts = "abcd" if part == "train" else "ef"
        assert [json.loads(line)["text"] for line in lines] == list(texts)
    assert run("inspect", prefix, "--show", 1, "--tokenizer-type", "CharLevelTokenizer").exit_code == 2


def test_verify_misses_a_file_that_the_manifest_describes(preprocessed) -> None:
    prefix = preprocessed("one", "a text")
    Path(f"{prefix}.offsets").unlink()
    result = run("verify", prefix)
    assert result.exit_code == 2
    assert shows(result.stderr, "one_text_document.offsets", "one_text_document.manifest.json")


def test_invalid_request_prints_only_the_error(preprocessed) -> None:
    result = run("inspect", preprocessed("one", "a"), "--show", 1, "--tokenizer-type", "HFTokenizer")
    assert (result.exit_code, result.stdout) == (2, "")


def test_count_names_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "caf\u00e9"}\n{"text": ""}\n{"text": 3}\n', encoding="utf-8")
    result = run("count", "--input", tmp_path / "a.jsonl")
    rows = {line[:12].strip(): line[12:].strip() for line in result.stdout.splitlines()}
    assert rows == {
        "documents": "2", "characters": "4", "bytes": "5", "empty": "1", "too long": "0", "unreadable": "1",
        "null": "0",
    }  # fmt: skip
    assert shows(result.stderr, "a.jsonl", "line 3", "'text'")
    assert "1 document cannot" in result.stderr
    assert shows(result.stderr, "neox-launch", "neox-data")
    assert result.exit_code == 1
    (tmp_path / "a.jsonl").write_text('{"text": "all"}\n')
    assert run("count", "--input", tmp_path / "a.jsonl").exit_code == 0


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_missing_dataset_is_exit_code_2(tmp_path: Path, command: str) -> None:
    result = run(command, tmp_path / "none")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {tmp_path}/none.idx does not exist")


def test_train_tokenizer_makes_a_tokenizer(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"body": "the cat and the hat " * 9}))
    output = tmp_path / "new" / "tokenizer.json"
    result = run(
        "train-tokenizer", "--input", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--jsonl-key", "body",
        "--vocab-size", 262, "--output", output,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert f"wrote {output}: 262 entries" in result.stdout
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=output)
    assert tokenizer.decode(tokenizer.encode("the caf\u00e9")) == "the caf\u00e9"


def test_special_tokens_are_part_of_a_trained_vocabulary_or_added_behind_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat and the hat " * 9)
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    words = ("train-tokenizer", "--input", tmp_path / "a.txt", "--vocab-size", 262, "--output", old)
    assert run(*words, "--special-token", "<|mask|>").exit_code == 0
    before = build_tokenizer("HFTokenizer", vocab_file=old)
    assert before.token_id("<|mask|>") == 2
    assert before.vocab_size == 262
    result = run("add-tokens", old, "<|fim_prefix|>", "<|fim_middle|>", "--output", new)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"wrote {new}: 264 entries"
    after = build_tokenizer("HFTokenizer", vocab_file=new)
    assert [after.token_id(name) for name in ("<|fim_prefix|>", "<|fim_middle|>")] == [262, 263]
    assert after.encode("the cat<|fim_middle|>") == [*before.encode("the cat"), 263]
    assert {2, 262, 263} <= after.special_ids


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["<|padding|>"], "has '<|padding|>' already, with id 1; remove it from the list"),
    ],
)
def test_tokens_that_cannot_be_added_are_named(
    tmp_path: Path, tokenizer_json: Path, tokens: list[str], message: str
) -> None:
    result = run("add-tokens", tokenizer_json, *tokens, "--output", tmp_path / "new.json")
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "new.json").exists()


def test_train_tokenizer_refuses_an_empty_special_token(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "one"}\n')
    arguments = ["--input", corpus, "--special-token", "", "--output", tmp_path / "new.json"]
    result = run("train-tokenizer", *arguments)
    assert (result.exit_code, (tmp_path / "new.json").exists()) == (2, False)
    assert "token is empty" in result.stderr


@pytest.mark.parametrize("output", ["corpus.jsonl", "link.jsonl"])
def test_train_tokenizer_does_not_overwrite_its_corpus(tmp_path: Path, output: str) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "one"}\n')
    (tmp_path / "link.jsonl").symlink_to("corpus.jsonl")
    result = run("train-tokenizer", "--input", corpus, "--vocab-size", 259, "--output", tmp_path / output)
    assert result.exit_code == 2
    assert "require this tokenizer" in result.stderr
    assert corpus.read_text() == '{"text": "one"}\n'


def test_a_tokenizer_is_never_overwritten(tmp_path: Path, tokenizer_json: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat and the hat " * 9)
    before = tokenizer_json.read_bytes()
    train = ("train-tokenizer", "--input", tmp_path / "a.txt", "--vocab-size", 262, "--output")
    for command in (
        (*train, tokenizer_json),
        ("add-tokens", tokenizer_json, "<|x|>", "--output", tokenizer_json),
    ):
        result = run(*command)
        assert result.exit_code == 2
        assert f"--output {tokenizer_json} exists" in result.stderr
        assert result.stderr.endswith("give another --output, or delete the file first\n")
        assert tokenizer_json.read_bytes() == before


def test_train_tokenizer_leaves_bad_lines_out_on_request(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the cat"}\n{"text": 3}\n')
    words = (
        "train-tokenizer",
        "--input",
        tmp_path / "a.jsonl",
        "--vocab-size",
        259,
        "--output",
        tmp_path / "t.json",
    )
    result = run(*words)
    assert result.exit_code == 2
    assert shows(result.stderr, "line 2", "'text'")
    result = run(*words, "--skip-bad-lines")
    assert result.exit_code == 0
    assert "1 unreadable document" in result.stderr


@pytest.mark.parametrize("words", [("stdlib-corpus", ""), ("stdlib-corpus", "/")])
def test_folder_as_output_file_is_refused(words: tuple[str, ...]) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert "is a folder" in result.stderr


def test_train_tokenizer_shows_progress_and_what_it_does_not_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"body": "some text"}\n' * 300)
    (tmp_path / "in" / "b.csv").touch()
    result = run(
        "train-tokenizer", "--input", tmp_path / "in", "--json-keys", "body", "--vocab-size", 260,
        "--log-interval", 100, "--output", tmp_path / "t.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    assert lines[0].endswith(" 1 file, 6.6 kB")
    assert [line.split(" documents")[0] for line in lines[1:4]] == ["100", "200", "300"]
    assert "tokens/s" not in lines[0]
    assert lines[4].endswith(" 300 documents")
    assert f"  {tmp_path}/in/b.csv" in lines


def test_train_tokenizer_reports_a_corpus_that_is_too_small(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab")
    result = run(
        "train-tokenizer", "--input", tmp_path / "a.txt", "--vocab-size", 300, "--output", tmp_path / "t.json"
    )
    assert result.exit_code == 0
    assert shows(result.stderr, "only 259", "300 requested")


def test_stdlib_corpus_is_readable(tmp_path: Path) -> None:
    result = run("stdlib-corpus", tmp_path / "corpus.jsonl")
    assert result.exit_code == 0
    with (tmp_path / "corpus.jsonl").open() as lines:
        paths = [json.loads(line)["path"] for line in lines]
    assert paths == sorted(paths, key=lambda path: hashlib.sha256(path.encode()).digest())
    assert "json/decoder.py" in paths


@pytest.mark.parametrize("command", [(), *((name,) for name in main.commands)])
def test_every_command_knows_h_as_help(command: tuple[str, ...]) -> None:
    short, long = run(*command, "-h"), run(*command, "--help")
    assert short.exit_code == 0
    assert short.stdout == long.stdout
    assert "-h, --help" in short.stdout
