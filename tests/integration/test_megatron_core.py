"""Files and orders against megatron-core's own code: bytes both ways, samples and blends where they agree."""

import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neox_data.blend import blend_order
from neox_data.gpt_dataset import GPTDataset
from neox_data.indexed import IndexedDatasetWriter, open_indexed
from neox_data.indexed.verify import verify_indexed
from neox_data.weights import normalise_weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    reason = "megatron-core is not installed: pip install --no-deps megatron-core"
    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp", reason=reason)
    from megatron.core.datasets import gpt_dataset, indexed_dataset
    from megatron.core.datasets.utils import Split

DTYPES = ("uint8", "int16", "int32", "int64", "uint16")
corpora = st.lists(st.lists(st.integers(0, 120), max_size=30), min_size=1, max_size=20)


def write_ours(prefix: Path, documents: list[list[int]], dtype: str) -> None:
    with IndexedDatasetWriter(prefix, dtype=dtype) as writer:
        for document in documents:
            writer.append(np.array(document, dtype))


def write_theirs(
    prefix: Path, documents: list[list[int]], dtype: str, modes: list[int] | None = None
) -> None:
    import torch

    builder = indexed_dataset.IndexedDatasetBuilder(
        f"{prefix}.bin", dtype=np.dtype(dtype).type, multimodal=modes is not None
    )
    for number, document in enumerate(documents):
        builder.add_item(torch.tensor(document, dtype=torch.int64), *([modes[number]] if modes else ()))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def as_lists(dataset) -> list[list[int]]:
    return [dataset[number].tolist() for number in range(len(dataset))]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15, deadline=None)
@given(documents=corpora)
def test_files_are_the_same_to_the_byte_and_each_reads_the_others(tmp_path_factory, dtype, documents) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    write_ours(folder / "ours", documents, dtype)
    write_theirs(folder / "theirs", documents, dtype)
    for ending in ("bin", "idx"):
        assert (folder / f"ours.{ending}").read_bytes() == (folder / f"theirs.{ending}").read_bytes()
    assert as_lists(verify_indexed(folder / "theirs")) == documents
    if any(documents):  # An empty file cannot be mapped, which theirs does.
        theirs = indexed_dataset.IndexedDataset(str(folder / "ours"))
        assert as_lists(theirs) == documents
        assert theirs.document_indices.tolist() == list(range(len(documents) + 1))


def test_multimodal_files_are_read(tmp_path: Path) -> None:
    write_theirs(tmp_path / "theirs", [[1, 2], [3], [4, 5]], "int32", modes=[0, 1, 0])
    assert as_lists(open_indexed(tmp_path / "theirs")) == [[1, 2], [3], [4, 5]]


def their_dataset(prefix: Path, *, num_samples: int, seq_length: int, seed: int):
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([str(prefix)], None),
        split="1,0,0",
        path_to_cache=str(prefix.parent / "cache"),
        tokenizer=SimpleNamespace(vocab_size=512, eod=0, unique_identifiers={"class": "none"}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    indexed = indexed_dataset.IndexedDataset(str(prefix))
    return gpt_dataset.GPTDataset(
        indexed, str(prefix), np.arange(len(indexed), dtype=np.int32), num_samples, Split.train, config
    )


# A part of one pass, all of it, and three, of whose last so much is needed that it is not shuffled apart.
@pytest.mark.parametrize("num_samples", [10, 312, 910])
@pytest.mark.parametrize("seed", [1, 1234])
def test_samples_are_the_same_where_the_last_pass_is_not_shuffled_apart(
    tmp_path: Path, num_samples: int, seed: int
) -> None:
    random = np.random.default_rng(0)
    sizes = random.integers(1, 200, 220)
    write_ours(tmp_path / "data", [random.integers(1, 500, size).tolist() for size in sizes], "uint16")
    seq_length = int(sizes.sum()) // 313
    theirs = their_dataset(tmp_path / "data", num_samples=num_samples, seq_length=seq_length, seed=seed)
    ours = GPTDataset(
        open_indexed(tmp_path / "data"), name="train", documents=np.arange(220), num_samples=num_samples,
        seq_length=seq_length, seed=seed, prefix=tmp_path / "data",
    )  # fmt: skip
    assert theirs.document_index.tolist() == ours.index.documents.tolist()
    assert theirs.sample_index.tolist() == ours.index.starts.tolist()
    assert theirs.shuffle_index.tolist() == ours.index.shuffle.tolist()
    for item in range(0, len(theirs), 7):
        sample = theirs[item]
        assert ours[item][:-1].tolist() == sample["tokens"].tolist()
        assert ours[item][1:].tolist() == sample["labels"].tolist()


@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=60), st.integers(1, 3000))
def test_blends_are_the_same(weights: list[float], num_items: int) -> None:
    shares = normalise_weights(weights, len(weights))
    datasets, places = np.zeros(num_items, np.int16), np.zeros(num_items, np.int64)
    helpers.build_blending_indices(datasets, places, shares, len(shares), num_items, False)
    order = blend_order(shares, num_items)
    assert order.datasets.tolist() == datasets.tolist()
    assert [order.locate(item)[1] for item in range(num_items)] == places.tolist()
