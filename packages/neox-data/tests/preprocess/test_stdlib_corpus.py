import json
from pathlib import Path

import pytest

from neox_data.errors import CorpusError
from neox_data.preprocess.stdlib_corpus import CorpusCounts, write_stdlib_corpus


def test_each_source_file_is_a_line(tmp_path: Path) -> None:
    root = tmp_path / "lib"
    files = {
        "b.py": "\u00e9 = 1\n",
        "a/c.py": "x",
        "a/site-packages/d.py": "no",
        "test/e.py": "no",
        "f.txt": "no",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "g.py").write_bytes(b"\xff")
    counts = write_stdlib_corpus(tmp_path / "out" / "corpus.jsonl", root=root)
    lines = (tmp_path / "out" / "corpus.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"text": "\u00e9 = 1\n", "path": "b.py"},  # 4a5b... is the hash of its name
        {"text": "x", "path": "a/c.py"},  # dce7...
    ]
    assert counts == CorpusCounts(files=2, undecodable=1, num_bytes=8)


def test_the_order_does_not_follow_the_alphabet(tmp_path: Path) -> None:
    for letter in "abcdefghijklmnopqrstuvwxyz":
        (tmp_path / f"{letter}.py").touch()
    write_stdlib_corpus(tmp_path / "corpus.jsonl", root=tmp_path)
    lines = (tmp_path / "corpus.jsonl").read_text().splitlines()
    assert "".join(json.loads(line)["path"][0] for line in lines) == "eqnigdoyvbzjurwlthsxckmfpa"


def test_a_python_without_source_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    with pytest.raises(CorpusError, match="lib contains no Python source files"):
        write_stdlib_corpus(tmp_path / "corpus.jsonl", root=tmp_path / "lib")
    assert [path.name for path in tmp_path.iterdir()] == ["lib"]


def test_this_pythons_library_is_a_corpus_of_the_expected_size(tmp_path: Path) -> None:
    counts = write_stdlib_corpus(tmp_path / "corpus.jsonl")
    assert 10e6 < counts.num_bytes < 25e6
    assert counts.files > 500
