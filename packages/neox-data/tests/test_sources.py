import gzip
import json
from pathlib import Path

import pytest

from neox_data.indexed import open_indexed
from neox_data.manifest import read_manifest, verify_manifest
from neox_data.preprocess.options import Options
from neox_data.preprocess.run import preprocess
from neox_data.preprocess.shards import preprocess_resumably
from neox_data.sources import DocumentSources
from neox_data.tokenizers import build_tokenizer

LINES = ["first", "", "th\u00efrd \u4f60", "fourth"]
TOKENIZER = build_tokenizer("CharLevelTokenizer")


@pytest.fixture
def corpus(tmp_path: Path) -> list[Path]:
    lines = [json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in LINES]
    (tmp_path / "a.jsonl").write_bytes(b"\n" + b"".join(lines))
    (tmp_path / "b.txt").write_text("a whole file")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b"".join(reversed(lines))))
    return [tmp_path / name for name in ("a.jsonl", "b.txt", "c.jsonl.gz")]


def text_at(path: str, offset: int) -> str:
    """Return the document at a position, read with plain file operations."""
    data = gzip.decompress(Path(path).read_bytes()) if path.endswith(".gz") else Path(path).read_bytes()
    return json.loads(data[offset:].split(b"\n")[0])["text"] if ".jsonl" in path else data[offset:].decode()


def check(prefix: Path | str) -> None:
    dataset, sources = open_indexed(prefix), DocumentSources(prefix)
    found = [sources.source_of(document) for document in range(len(dataset))]
    texts = [TOKENIZER.decode(dataset[document].tolist()) for document in range(len(dataset))]
    assert texts == ["first", LINES[2], "fourth", "a whole file", "fourth", LINES[2], "first"]
    assert [text_at(source.path, source.offset) for source in found] == texts
    assert sources.source_of(len(dataset)) is None
    assert verify_manifest(prefix)


def test_every_document_is_found_again_in_its_source(corpus: list[Path], tmp_path: Path) -> None:
    preprocess(corpus, output_prefix=tmp_path / "out", tokenizer=TOKENIZER, options=Options())
    check(tmp_path / "out_text_document")
    inputs = read_manifest(tmp_path / "out_text_document")["inputs"]
    assert [source["documents"] for source in inputs] == [3, 1, 3]


def test_merged_shards_keep_the_sources(corpus: list[Path], tmp_path: Path) -> None:
    preprocess_resumably(
        corpus, output_prefix=tmp_path / "out", tokenizer=TOKENIZER, options=Options(), shard_bytes=1
    )
    check(tmp_path / "out_text_document")
    assert not (tmp_path / "out.shards").exists()


def test_a_dataset_without_a_manifest_or_with_other_offsets_has_no_sources(
    corpus: list[Path], tmp_path: Path, write_dataset
) -> None:
    assert DocumentSources(write_dataset([[1, 2]])).source_of(0) is None
    preprocess(corpus, output_prefix=tmp_path / "out", tokenizer=TOKENIZER, options=Options())
    (tmp_path / "out_text_document.offsets").write_bytes(b"\0" * 8)
    assert DocumentSources(tmp_path / "out_text_document").source_of(0) is None


def test_a_new_dataset_leaves_no_offsets_of_the_old(
    corpus: list[Path], tmp_path: Path, write_dataset
) -> None:
    preprocess(corpus, output_prefix=tmp_path / "out", tokenizer=TOKENIZER, options=Options())
    write_dataset([[1], [2]], name="out_text_document")
    assert not (tmp_path / "out_text_document.offsets").exists()
