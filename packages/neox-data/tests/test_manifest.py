import json
import os
from pathlib import Path

import pytest

from neox_data import whole_files
from neox_data.errors import IndexedDatasetError, TokenizerError
from neox_data.indexed import IndexedDatasetWriter
from neox_data.manifest import (
    check_tokenizer,
    describe_tokenizer,
    merge_manifests,
    read_manifest,
    tokens_sha256,
    verify_manifest,
    write_manifest,
)
from neox_data.tokenizers import build_tokenizer
from support.refusals import refused

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1.


@pytest.fixture
def dataset(write_dataset) -> Path:
    prefix = write_dataset([[1, 2], [3]])
    write_manifest(
        prefix,
        inputs=[{"path": "a.jsonl", "bytes": 3, "sha256": ABC}],
        tokenizer=describe_tokenizer(build_tokenizer("CharLevelTokenizer")),
        options={"key": "text"},
        counts={"documents": 2},
    )
    return prefix


def test_written_manifest_is_read_and_verified(dataset: Path) -> None:
    manifest = read_manifest(dataset)
    assert manifest["counts"] == {"documents": 2}
    assert manifest["files"][".bin"]["bytes"] == 6
    assert verify_manifest(dataset) is True


def test_a_source_whose_name_is_not_utf8_is_recorded(dataset: Path) -> None:
    manifest = read_manifest(dataset)
    inputs = [{"path": os.fsdecode(b"caf\xc3\xa9 \xff.jsonl"), "bytes": 3, "sha256": ABC}]
    given = {name: manifest[name] for name in ("tokenizer", "options", "counts")}
    write_manifest(dataset, inputs=inputs, **given)
    assert "caf\u00e9 \\udcff.jsonl" in Path(f"{dataset}.manifest.json").read_text(encoding="utf-8")
    assert read_manifest(dataset)["inputs"] == inputs


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_a_changed_file_is_found(dataset: Path, ending: str) -> None:
    path = Path(f"{dataset}.{ending}")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with refused(IndexedDatasetError, f"corpus.{ending}", "corpus.manifest.json"):
        verify_manifest(dataset)


def test_dataset_without_a_manifest_is_accepted(write_dataset) -> None:
    prefix = write_dataset([[1]])
    assert read_manifest(prefix) is None
    assert verify_manifest(prefix) is False
    check_tokenizer(prefix, build_tokenizer("CharLevelTokenizer"))


def test_a_new_dataset_of_the_same_name_has_not_the_old_manifest(dataset: Path) -> None:
    with IndexedDatasetWriter(dataset, dtype="u2") as writer:
        writer.append([9])
    assert read_manifest(dataset) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", ""),
        ("[]", ""),
        ("{}", "'format' is missing"),
        ('{"format": "other"}', "its format is"),
        ('{"format": "neox-data-manifest-1"}', "'inputs' is missing"),
    ],
)
def test_a_damaged_one_is_named(dataset: Path, text: str, why: str) -> None:
    Path(f"{dataset}.manifest.json").write_text(text)
    with refused(IndexedDatasetError, "corpus.manifest.json", f"manifest ({why}", code="invalid-manifest"):
        read_manifest(dataset)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("files", {".bin": None}),
        ("files", []),
        ("counts", {"documents": "2"}),
        ("inputs", [1]),
        ("tokenizer", "x"),
    ],
)
def test_values_of_the_wrong_type_are_named(dataset: Path, name: str, value: object) -> None:
    path = Path(f"{dataset}.manifest.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with refused(IndexedDatasetError, f"manifest ({name}", code="invalid-manifest"):
        read_manifest(dataset)


def test_another_tokenizer_is_refused(dataset: Path, tokenizer_json: Path) -> None:
    check_tokenizer(dataset, build_tokenizer("CharLevelTokenizer"))
    with refused(TokenizerError, "CharLevelTokenizer, 512"):
        check_tokenizer(dataset, build_tokenizer("HFTokenizer", vocab_file=tokenizer_json))


def test_fingerprint_depends_on_what_determines_the_ids(tokenizer_json: Path, tmp_path: Path) -> None:
    one = build_tokenizer("HFTokenizer", vocab_file=tokenizer_json)
    description = json.loads(tokenizer_json.read_text())
    description["truncation"] = {
        "direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    (tmp_path / "same.json").write_text(json.dumps(description))
    assert build_tokenizer("HFTokenizer", vocab_file=tmp_path / "same.json").fingerprint == one.fingerprint
    description["model"]["merges"].pop()
    (tmp_path / "other.json").write_text(json.dumps(description))
    assert build_tokenizer("HFTokenizer", vocab_file=tmp_path / "other.json").fingerprint != one.fingerprint


def test_datasets_of_different_tokenizers_are_not_merged(
    dataset: Path, write_dataset, tokenizer_json
) -> None:
    other = write_dataset([[1]], name="other")
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=tokenizer_json)
    write_manifest(other, inputs=[], tokenizer=describe_tokenizer(tokenizer), options={}, counts={})
    with refused(TokenizerError, code="other-tokenizer"):
        merge_manifests([dataset, other])
    assert merge_manifests([dataset, dataset])["counts"] == {"documents": 4}


def test_counts_missing_in_a_part_are_missing_in_the_whole(dataset: Path, write_dataset) -> None:
    other = write_dataset([[1]], name="other")
    tokenizer = describe_tokenizer(build_tokenizer("CharLevelTokenizer"))
    counts = {"characters": 3, "documents": 1}
    write_manifest(other, inputs=[], tokenizer=tokenizer, options={}, counts=counts)
    assert merge_manifests([other, dataset])["counts"] == {"documents": 3}
    assert merge_manifests([other, other])["counts"] == {"characters": 6, "documents": 2}


def test_the_hash_of_the_tokens_is_that_of_the_file_as_it_is(dataset: Path, monkeypatch) -> None:
    path, listed = Path(f"{dataset}.bin"), Path(f"{dataset}.manifest.json")
    recorded = read_manifest(dataset)["files"][".bin"]["sha256"]
    with monkeypatch.context() as patch:
        # It is not read.
        patch.setattr("neox_data.manifest.sha256_of_file", lambda path: "read")
        assert tokens_sha256(dataset) == recorded
    os.utime(path, ns=(0, listed.stat().st_mtime_ns + 1))
    assert tokens_sha256(dataset) == recorded == whole_files.sha256_of_file(path)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    os.utime(path, ns=(0, listed.stat().st_mtime_ns + 1))
    assert tokens_sha256(dataset) == whole_files.sha256_of_file(path) != recorded
    # Another size is seen, whenever it was written.
    path.write_bytes(b"abc")
    os.utime(path, ns=(0, 0))
    assert tokens_sha256(dataset) == ABC
    listed.unlink()
    assert tokens_sha256(dataset) == ABC
