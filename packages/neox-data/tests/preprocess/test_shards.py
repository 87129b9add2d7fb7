import hashlib
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from neox_data.amount_progress import Counts
from neox_data.errors import CorpusError
from neox_data.indexed import open_indexed
from neox_data.preprocess import shards
from neox_data.preprocess.cli import main
from neox_data.preprocess.options import Options
from neox_data.preprocess.part_hashes import hashed_parts
from neox_data.preprocess.run import preprocess
from neox_data.preprocess.shards import preprocess_resumably, take_shard
from neox_data.tokenizers import build_tokenizer
from support.refusals import refused

TOKENIZER = build_tokenizer("CharLevelTokenizer")


@pytest.fixture
def corpus(tmp_path: Path) -> list[Path]:
    (tmp_path / "in").mkdir()
    paths = [tmp_path / "in" / f"{number}.jsonl" for number in range(6)]
    for number, path in enumerate(paths):
        lines = [json.dumps({"text": f"{number} {i}", "title": ""}) for i in range(number * 3)]
        path.write_text("".join(line + "\n" for line in lines))
    return paths


def resumably(paths: list[Path], output: Path, *, report=None, **options: object):
    return preprocess_resumably(
        paths,
        output_prefix=output,
        tokenizer=TOKENIZER,
        options=Options(append_end=True, **options),
        report=report,
        shard_bytes=1,
    )


def files(output: Path) -> list[bytes]:
    return [Path(f"{output}_text_document.{end}").read_bytes() for end in ("bin", "idx", "manifest.json")]


@pytest.fixture
def undisturbed(corpus: list[Path], tmp_path: Path) -> list[bytes]:
    preprocess(
        corpus, output_prefix=tmp_path / "whole", tokenizer=TOKENIZER, options=Options(append_end=True)
    )
    return files(tmp_path / "whole")


def test_shards_equal_a_single_run(corpus, tmp_path: Path, undisturbed) -> None:
    fractions = []
    summary = resumably(corpus, tmp_path / "out", report=lambda counts: fractions.append(counts.fraction))
    assert files(tmp_path / "out") == undisturbed
    assert not (tmp_path / "out.shards").exists()
    assert (summary.documents, summary.resumed_shards) == (45, 0)
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


@pytest.mark.parametrize("part_bytes", [1, 40, 100])
def test_a_large_file_is_several_shards(corpus, tmp_path: Path, undisturbed, part_bytes: int) -> None:
    summary = preprocess_resumably(
        corpus, output_prefix=tmp_path / "out", tokenizer=TOKENIZER, options=Options(append_end=True),
        shard_bytes=1, part_bytes=part_bytes,
    )  # fmt: skip
    assert files(tmp_path / "out") == undisturbed
    assert summary.documents == 45


def test_killed_run_continues_within_the_file(corpus, tmp_path: Path, undisturbed) -> None:
    class Stopped(Exception):
        pass

    def stop(counts: Counts) -> None:
        if len(list((tmp_path / "out.shards").glob("*.manifest.json"))) == 9:
            raise Stopped

    sizes = {"shard_bytes": 1, "part_bytes": 40}
    options = {"tokenizer": TOKENIZER, "options": Options(append_end=True), **sizes}
    with pytest.raises(Stopped):
        preprocess_resumably(corpus, output_prefix=tmp_path / "out", report=stop, **options)
    summary = preprocess_resumably(corpus, output_prefix=tmp_path / "out", **options)
    assert summary.resumed_shards == 9
    assert files(tmp_path / "out") == undisturbed


def test_a_bad_line_within_a_large_file_is_named_by_its_place(corpus, tmp_path: Path) -> None:
    corpus[2].write_text(corpus[2].read_text() + "{\n")
    with refused(CorpusError, "2.jsonl", "line 1", "JSON"):
        preprocess_resumably(
            corpus, output_prefix=tmp_path / "out", tokenizer=TOKENIZER, options=Options(),
            shard_bytes=1, part_bytes=1,
        )  # fmt: skip


def kill_after(shards: int, corpus: list[Path], output: Path) -> None:
    """Run until the given number of shards and a part of the next one are finished, then SIGKILL."""
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from neox_data.preprocess.options import Options\n"
        "from neox_data.preprocess.shards import preprocess_resumably\n"
        "from neox_data.tokenizers import build_tokenizer\n"
        "output, shards, *paths = sys.argv[1:]\n"
        "def report(counts):\n"
        "    if len(list(Path(output + '.shards').glob('*.manifest.json'))) >= int(shards):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "preprocess_resumably([Path(path) for path in paths], output_prefix=output,\n"
        "    tokenizer=build_tokenizer('CharLevelTokenizer'), options=Options(append_end=True),\n"
        "    report=report, shard_bytes=1)\n"
    )
    words = [sys.executable, "-c", script, str(output), str(shards), *map(str, corpus)]
    assert subprocess.run(words, check=False).returncode == -signal.SIGKILL


def test_a_killed_run_is_taken_up_at_its_last_finished_shard(corpus, tmp_path: Path, undisturbed) -> None:
    output = tmp_path / "out"
    for finished in (0, 2, 4):
        kill_after(finished, corpus, output)
        assert not Path(f"{output}_text_document.idx").exists()
    summary = resumably(corpus, output)
    assert summary.resumed_shards == 4
    assert summary.documents == 45
    assert files(output) == undisturbed
    assert not (tmp_path / "out.shards").exists()


@pytest.mark.parametrize("name", ["checkpoint/", "notes.txt", "000000.bin"])
def test_other_files_in_the_folder_of_shards_are_kept(corpus, tmp_path: Path, name: str) -> None:
    kill_after(2, corpus, tmp_path / "out")
    path = tmp_path / "out.shards" / name
    if name.endswith("/"):
        path.mkdir()
    else:
        path.write_text("mine")
    with refused(CorpusError, "out.shards", path.name, "--resume"):
        resumably(corpus, tmp_path / "out")
    assert path.exists()
    path.rmdir() if name.endswith("/") else path.unlink()
    assert resumably(corpus, tmp_path / "out").resumed_shards == 2


def test_a_shard_of_other_files_or_options_is_made_again(corpus, tmp_path: Path) -> None:
    def finished_of(**options: object) -> int:
        return resumably(corpus, tmp_path / "out", **options).resumed_shards

    kill_after(3, corpus, tmp_path / "out")
    assert finished_of(max_document_bytes=1000) == 0
    kill_after(3, corpus, tmp_path / "out")
    corpus[1].write_text(corpus[1].read_text().replace("1 0", "9 9"))
    assert finished_of() == 2
    assert bytes(open_indexed(tmp_path / "out_text_document")[0].tolist()) == b"9 9\0"


def test_shards_of_a_replaced_file_of_the_same_size_and_time_are_made_again(corpus, tmp_path: Path) -> None:
    kill_after(3, corpus, tmp_path / "out")
    times = corpus[1].stat()
    corpus[1].write_text(corpus[1].read_text().replace("1 0", "9 9"))
    os.utime(corpus[1], ns=(times.st_atime_ns, times.st_mtime_ns - 10**12))
    assert resumably(corpus, tmp_path / "out").resumed_shards == 2
    assert bytes(open_indexed(tmp_path / "out_text_document")[0].tolist()) == b"9 9\0"
    inputs = json.loads(files(tmp_path / "out")[2])["inputs"]
    assert inputs[1]["sha256"] == hashlib.sha256(corpus[1].read_bytes()).hexdigest()


def test_only_the_changed_part_of_a_large_file_is_made_again(corpus, tmp_path: Path) -> None:
    sizes = {"shard_bytes": 1, "part_bytes": 40}
    options = {"tokenizer": TOKENIZER, "options": Options(append_end=True), **sizes}

    def stop(counts: Counts) -> None:
        if len(list((tmp_path / "out.shards").glob("*.manifest.json"))) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preprocess_resumably(corpus, output_prefix=tmp_path / "out", report=stop, **options)
    corpus[2].write_text(corpus[2].read_text().replace("2 4", "2 x"))
    assert preprocess_resumably(corpus, output_prefix=tmp_path / "out", **options).resumed_shards == 8
    whole = tmp_path / "whole"
    preprocess(corpus, output_prefix=whole, tokenizer=TOKENIZER, options=Options(append_end=True))
    assert files(tmp_path / "out") == files(whole)


def test_a_file_that_changes_during_the_run_is_refused_and_then_repeated(
    corpus, tmp_path: Path, monkeypatch
) -> None:
    @contextmanager
    def hashed_at_once(parts):
        with hashed_parts(parts) as hashes:
            hashes.of_files()
        yield hashes

    def change(counts: Counts) -> None:
        is_third_finished = (tmp_path / "out.shards" / "000002_text_document.manifest.json").exists()
        # Once: a file that is being written again could be hashed while it is empty.
        if is_third_finished and "5 0" in (text := corpus[5].read_text()):
            corpus[5].write_text(text.replace("5 0", "5 x"))

    with monkeypatch.context() as patched:
        patched.setattr(shards, "hashed_parts", hashed_at_once)
        with refused(CorpusError, "5.jsonl", "--resume", code="changed"):
            resumably(corpus, tmp_path / "out", report=change)
    assert not list(tmp_path.glob("out_*"))
    summary = resumably(corpus, tmp_path / "out")
    # The last shard was made of the new content, and can stay.
    assert summary.resumed_shards == 5
    assert b"5 x" in (tmp_path / "out_text_document.bin").read_bytes().replace(b"\0", b"")


def test_shards_that_were_damaged_are_named_and_then_repeated(corpus, tmp_path: Path, undisturbed) -> None:
    kill_after(4, corpus, tmp_path / "out")
    damaged = tmp_path / "out.shards" / "000003_text_document.bin"
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    with refused(CorpusError, "/000003_text_document", "--resume"):
        resumably(corpus, tmp_path / "out")
    assert not list(tmp_path.glob("out_*"))
    assert resumably(corpus, tmp_path / "out").resumed_shards == 4
    assert files(tmp_path / "out") == undisturbed


def test_a_corpus_without_text_makes_no_dataset_in_shards_either(corpus, tmp_path: Path) -> None:
    with refused(CorpusError, "'title'"):
        resumably(corpus, tmp_path / "out", keys=("title",))
    assert not list(tmp_path.glob("out_*"))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments), "--tokenizer-type", "CharLevelTokenizer"])


def test_machines_share_a_corpus_by_files(corpus, tmp_path: Path, undisturbed) -> None:
    prefixes = []
    for number in (1, 2, 3):
        result = run(
            "--input", tmp_path / "in", "--append-eod", "--shard", f"{number}/3", "--resume",
            "--output-prefix", tmp_path / "part",
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        prefixes.append(tmp_path / f"part_shard-{number}-of-3_text_document")
    assert b"".join(Path(f"{prefix}.bin").read_bytes() for prefix in prefixes) == undisturbed[0]


def test_shards_are_all_files_in_order_and_near_to_equal_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number:02}" for number in range(12)]
    for number, path in enumerate(paths):
        path.write_bytes(b"x" * (100 if number < 10 else 1000))
    parts = [take_shard(paths, f"{number}/4")[0] for number in (1, 2, 3, 4)]
    assert [path for part in parts for path in part] == paths
    assert [len(part) for part in parts] == [7, 3, 1, 1]
    assert take_shard(paths, "3/12")[0] == [paths[2]]
    assert take_shard(paths, "3/12")[1] == "_shard-03-of-12"


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b", "1/0"])
def test_invalid_shards_are_refused(tmp_path: Path, shard: str) -> None:
    with refused(CorpusError, "2/8"):
        take_shard([tmp_path] * 3, shard)


def test_more_shards_than_files_are_refused(tmp_path: Path) -> None:
    with refused(CorpusError, "3 files", "4 shards"):
        take_shard([tmp_path] * 3, "1/4")
