import hashlib
import json
import sys
from pathlib import Path

import pytest

from neox_data.errors import CorpusError
from neox_data.preprocess.stdlib_corpus import CorpusCounts, listed_files, write_stdlib_corpus
from support.refusals import refused


def write_library(root: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def test_each_listed_file_is_a_line(tmp_path: Path) -> None:
    root, output = tmp_path / "lib", tmp_path / "out" / "corpus.jsonl"
    write_library(root, {"b.py": "\u00e9 = 1\n".encode(), "a/c.py": b"x", "other.py": b"no"})
    counts = write_stdlib_corpus(output, root=root, names=["b.py", "gone.py", "a/c.py"])
    assert [json.loads(line) for line in output.read_text().splitlines()] == [
        {"text": "\u00e9 = 1\n", "path": "b.py"},
        {"text": "x", "path": "a/c.py"},
    ]
    digest = hashlib.sha256(output.read_bytes()).hexdigest()
    assert counts == CorpusCounts(files=2, missing=("gone.py",), num_bytes=8, sha256=digest)


def test_the_list_is_in_the_order_of_hashes() -> None:
    names = listed_files()
    assert len(set(names)) == len(names) > 400
    assert names == sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())


def test_a_python_without_source_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    with refused(CorpusError, code="no-sources"):
        write_stdlib_corpus(tmp_path / "corpus.jsonl", root=tmp_path / "lib")
    assert [path.name for path in tmp_path.iterdir()] == ["lib"]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="the list is that of 3.11 to 3.13")
def test_this_python_has_all_listed_files(tmp_path: Path) -> None:
    counts = write_stdlib_corpus(tmp_path / "corpus.jsonl")
    assert counts.missing == ()
    assert 6e6 < counts.num_bytes < 8e6
