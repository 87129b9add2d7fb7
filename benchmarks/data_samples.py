"""Compare opening, sample indices, blends and random access with megatron-core.

    pip install --no-deps megatron-core
    python benchmarks/data_samples.py --items 100000000 --epochs 1 100

Times are CPU times, which depend little on other load; each is the best of three.
"""

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from neox_data.blend import blend_order
from neox_data.gpt_dataset import GPTDataset
from neox_data.indexed import IndexedDatasetWriter, open_indexed
from neox_data.lazy_dataset import LazyGPTDataset
from neox_data.native import load_native
from neox_data.samples.build_index import build_sample_index, num_samples_in
from neox_data.samples.native_index import best_builder

warnings.filterwarnings("ignore")
from megatron.core.datasets import gpt_dataset, helpers_cpp, indexed_dataset  # noqa: E402
from megatron.core.datasets.utils import Split  # noqa: E402

NUM_DOCUMENTS, SEQ_LENGTH = 85_172, 1024


def seconds_of(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(3):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best


def compare(name: str, ours: Callable[[], object], theirs: Callable[[], object]) -> None:
    mine, other = seconds_of(ours), seconds_of(theirs)
    print(f"{name:44} ours {mine * 1e3:10.3f} ms   theirs {other * 1e3:10.3f} ms   ratio {other / mine:5.2f}")


def their_index(sizes: np.ndarray, epochs: int) -> None:
    random = np.random.RandomState(1)
    documents = np.tile(np.arange(len(sizes), dtype=np.int32), epochs)
    random.shuffle(documents)
    tokens = int(sizes.sum())
    helpers_cpp.build_sample_idx_int32(sizes, documents, SEQ_LENGTH, epochs, tokens, True, 1)
    shuffle = np.arange(num_samples_in(tokens * epochs, seq_length=SEQ_LENGTH), dtype=np.uint32)
    random.shuffle(shuffle)


def their_dataset(prefix: Path, num_samples: int) -> gpt_dataset.GPTDataset:
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQ_LENGTH,
        blend=([str(prefix)], None),
        split="1,0,0",
        path_to_cache=str(prefix.parent / "cache"),
        tokenizer=SimpleNamespace(vocab_size=60_000, eod=0, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    indexed = indexed_dataset.IndexedDataset(str(prefix))
    documents = np.arange(len(indexed), dtype=np.int32)
    return gpt_dataset.GPTDataset(indexed, str(prefix), documents, num_samples, Split.train, config)


def their_blend(weights: np.ndarray, items: int) -> None:
    datasets, places = np.zeros(items, np.int16), np.zeros(items, np.int64)
    helpers_cpp.build_blending_indices(datasets, places, weights, len(weights), items, False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=1_000_000, help="length of a blend")
    parser.add_argument(
        "--epochs", type=int, nargs="+", default=[1, 20], help="passes of an index; the issue: 1 100"
    )
    options = parser.parse_args()
    print(f"native extension: {'built' if load_native() else 'not built'}; load {os.getloadavg()[0]:.1f}")
    random = np.random.default_rng(0)
    sizes = random.integers(100, 1100, NUM_DOCUMENTS).astype(np.int32)
    for epochs in options.epochs:
        samples = num_samples_in(int(sizes.sum()) * epochs, seq_length=SEQ_LENGTH)
        compare(
            f"sample index, {NUM_DOCUMENTS:,} documents, {epochs} epochs",
            lambda samples=samples: build_sample_index(
                np.arange(NUM_DOCUMENTS), sizes, num_samples=samples, seq_length=SEQ_LENGTH, seed=1,
                builder=best_builder(),
            ),
            lambda epochs=epochs: their_index(sizes, epochs),
        )  # fmt: skip
    for number in (8, 64, 1000):
        weights = random.random(number)
        weights /= weights.sum()
        compare(
            f"blend of {number} datasets, {options.items:,} items",
            lambda weights=weights: blend_order(weights, options.items),
            lambda weights=weights: their_blend(weights, options.items),
        )
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "data"
        with IndexedDatasetWriter(prefix, dtype=np.uint16) as writer:
            writer.append_all(np.zeros(int(sizes.sum()), np.uint16), sizes)
        opening_and_access(prefix)
        lazy(prefix)


def opening_and_access(prefix: Path) -> None:
    compare("opening", lambda: open_indexed(prefix), lambda: indexed_dataset.IndexedDataset(str(prefix)))
    indexed, count = open_indexed(prefix), 40_000
    ours = GPTDataset(
        indexed, name="train", documents=np.arange(len(indexed)), num_samples=count, seq_length=SEQ_LENGTH,
        seed=1, prefix=prefix,
    )  # fmt: skip
    theirs = their_dataset(prefix, count)
    places = np.random.default_rng(1).integers(0, count, 5_000).tolist()
    read = theirs._query_document_sample_shuffle_indices  # A sample's tokens, before masks are made of them.
    compare(
        f"{len(places):,} random samples of {SEQ_LENGTH} tokens",
        lambda: [ours[place] for place in places],
        lambda: [read(place) for place in places],
    )


def lazy(prefix: Path) -> None:
    indexed = open_indexed(prefix)

    def start() -> LazyGPTDataset:
        return LazyGPTDataset(
            indexed,
            name="train",
            documents=range(len(indexed)),
            num_samples=10**12,
            seq_length=SEQ_LENGTH,
            seed=1,
        )

    dataset, places = start(), np.random.default_rng(1).integers(0, 9_000, 2_000).tolist()
    print(f"lazy order: start-up {seconds_of(start) * 1e3:.3f} ms, ", end="")
    print(f"{seconds_of(lambda: [dataset[place] for place in places]) / len(places) * 1e6:.1f} us a sample")


if __name__ == "__main__":
    main()
