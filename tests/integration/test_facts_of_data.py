"""neox_data has its own copy of the facts that it shares with the launcher; the copies are equal."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from neox_config.errors import LaunchError
from neox_config.facts import corpora
from neox_config.facts.splits import PARTS, empty_parts, parts_with_documents, training_documents
from neox_config.facts.tokenizers import TOKENIZER_FACTS
from neox_data import block_index
from neox_data.errors import DataError, OtherResultError
from neox_data.indexed import layout
from neox_data.preprocess.inputs import ENDINGS, format_of
from neox_data.splits import split_documents
from neox_data.tokenizers import TOKENIZERS, build_tokenizer
from neox_data.tokenizers.train import FEWEST_ENTRIES, MOST_ENTRIES
from neox_launcher.init.texts import PreparationError
from neox_launcher.plan import dataset_files


def test_the_smallest_and_largest_vocabulary_are_the_same():
    assert (corpora.FEWEST_ENTRIES, corpora.MOST_ENTRIES) == (FEWEST_ENTRIES, MOST_ENTRIES)


def test_a_folder_with_the_result_of_other_texts_is_known_by_the_exit_code():
    assert PreparationError(OtherResultError.exit_code).exit_code == LaunchError.exit_code
    codes = [each.exit_code for each in (DataError, *DataError.__subclasses__())]
    assert codes.count(OtherResultError.exit_code) == 1


@pytest.mark.parametrize(
    ("index", "magic", "header"),
    [
        (layout.MMAP_INDEX, dataset_files._MMAP_MAGIC, dataset_files._MMAP_HEADER),
        (layout.LIST_INDEX, dataset_files._OLDER_MAGIC, dataset_files._OLDER_HEADER),
    ],
    ids=["mmap", "list"],
)
def test_the_header_of_an_index_is_read_as_it_is_written(index, magic, header):
    assert magic == index.magic
    # Counted apart, so that two swapped fields differ.
    written = np.zeros((), index.header_dtype)
    values = [index.magic, *range(3, 3 + len(index.header) - 1)]
    for field, value in zip(index.header, values, strict=True):
        written[field.name] = value
    read = header.unpack(written.tobytes())
    assert [read[0].rstrip(b"\0"), *read[1:]] == [magic.rstrip(b"\0"), *values[1:]]
    assert header.size == index.header_dtype.itemsize


def test_the_documents_of_each_part_are_counted_alike():
    random = np.random.RandomState(0)
    for _ in range(2000):
        shares = random.choice([0.0, 1e-6, 0.1, 1 / 3, 1.0, 5.0, 30.0, 969.0], size=random.randint(1, 4))
        if not shares.sum():
            continue
        split = "/".join(map(str, shares.tolist()))
        count = int(random.choice([0, 1, 2, 3, 7, 100, 99_999, 2**31]))
        parts = split_documents(split, count)
        assert training_documents(split, count) == len(parts["train"]), (split, count)
        assert parts_with_documents(split, count) == [part for part in PARTS if len(parts[part])], (
            split,
            count,
        )


@pytest.mark.parametrize("split", ["969, 30, 1", "1,1,1", "0.9/0.1", "1", "0,0,1", "1e-3,5,0.2"])
def test_the_same_parts_are_left_without_documents(split):
    shares = dict(zip(PARTS, [float(word) for word in split.replace("/", ",").split(",")], strict=False))
    for count in (*range(1, 70), 1000, 1001):
        parts = split_documents(split, count)
        expected = [part for part in PARTS if shares.get(part) and not parts[part]]
        assert empty_parts(split, count) == expected


def test_the_dtype_codes_mean_the_same_sizes():
    assert {code: dtype.itemsize for code, dtype in layout.DTYPES.items()} == dataset_files._ITEM_BYTES
    assert dataset_files._DISPUTED_CODES == layout.DISPUTED_DTYPE_CODES
    assert dataset_files._VERSION == layout.VERSION


def test_the_files_of_a_dataset_have_the_same_names():
    prefix = "a.b/c"
    assert dataset_files.index_path(prefix) == layout.idx_path(prefix)
    assert dataset_files.data_path(prefix) == layout.bin_path(prefix)
    assert dataset_files.manifest_path(prefix) == layout.manifest_path(prefix)
    assert dataset_files.BLOCK_INDEX == block_index.DESCRIPTION


def test_the_tokenizers_have_the_same_names():
    assert set(TOKENIZER_FACTS) == set(TOKENIZERS)


def write_vocabulary(folder: Path, name: str) -> dict[str, Path]:
    """Write a small tokenizer; `<|padding|>` is added to the vocabulary, `<|endoftext|>` is in it."""
    vocabulary = {"a": 0, "b": 1, "<|endoftext|>": 2}
    if name == "GPT2BPETokenizer":
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / "merges.txt").write_text("#version: 0.2\n")
        return {"vocab_file": folder / "vocab.json", "merge_file": folder / "merges.txt"}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|padding|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return {"vocab_file": folder / "tokenizer.json"}


@pytest.mark.parametrize(
    ("name", "entries"), [("CharLevelTokenizer", 512), ("GPT2BPETokenizer", 3), ("HFTokenizer", 4)]
)
def test_the_launcher_counts_the_entries_of_a_vocabulary_as_the_tokenizer_does(name, entries, tmp_path):
    files = {} if entries == 512 else write_vocabulary(tmp_path, name)
    assert set(TOKENIZER_FACTS[name].files) == set(files)
    assert build_tokenizer(name, **files).vocab_size == entries
    assert TOKENIZER_FACTS[name].read_entries(str(files.get("vocab_file", ""))) == entries


def test_every_vocabulary_that_the_launcher_counts_is_compared():
    counted = {name for name, facts in TOKENIZER_FACTS.items() if facts.is_fixed or facts.entries_of}
    assert counted == {"CharLevelTokenizer", "GPT2BPETokenizer", "HFTokenizer"}


def test_files_of_texts_are_known_by_the_same_names():
    assert corpora.ENDINGS == ENDINGS
    kinds = [
        "",
        *(
            ".jsonl .json .txt .md .markdown .dat .parquet .tar .zip .html .MD .Parquet .TGZ .bin .tgz"
        ).split(),
    ]
    packings = ["", ".gz", ".GZ", ".zst", ".bz2", ".xz", ".lz4", ".gz.gz"]
    names = [f"{stem}{kind}{packing}" for stem in ("a", "a_data") for kind in kinds for packing in packings]
    known = {name: bool(format_of(Path(name)).kind) for name in names}
    assert [known[name] for name in ("a.md.gz", "a_data.xz", "a.parquet.gz")] == [True, True, False]
