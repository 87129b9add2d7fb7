"""A run of whole passes over its data: which samples it reads, and how it resumes."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neox_config import load_config, resolve
from neox_config.errors import NeoXError
from neox_data.errors import DataError
from neox_data.indexed import IndexedDatasetWriter
from neox_data.trace import passages
from neox_launcher.plan.epochs import with_iterations
from neox_model.train.data.datasets import build_datasets
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.refusals import shows
from support.settings import SMALL_TRAINING

SETTINGS = {name: value for name, value in SMALL_TRAINING.items() if name != "split"}
SETTINGS |= {"train_epochs": 3, "make_vocab_size_divisible_by": 1, "use_wandb": False}
WAYS = {
    "one file": lambda prefix: {"data_path": prefix, "split": "70,30,0"},
    "lazy": lambda prefix: {"data_path": prefix, "split": "70,30,0", "sample_order": "lazy"},
    "paths": lambda prefix: {f"{part}_data_paths": [prefix] for part in ("train", "valid", "test")},
}


def resolved_with(folder: Path, settings: dict[str, Any], *, devices: int = 1) -> Any:
    path = folder / "settings.yml"
    path.write_text(json.dumps(SETTINGS | settings))
    return resolve(with_iterations(load_config([path]), devices=devices), devices=devices)


@pytest.mark.parametrize("way", WAYS)
def test_the_iterations_read_each_token_at_most_as_often_as_there_are_passes(tmp_path, way):
    resolved = resolved_with(tmp_path, WAYS[way](write_corpus(tmp_path)))
    dataset = build_datasets(resolved, ["train"])["train"]
    count = resolved.config.training.iterations * resolved.run.batch.whole
    read: Counter[tuple[int, int]] = Counter()
    for item in range(count):
        *pieces, last = list(passages(dataset, item))
        # The last token of a sample is only a label, and the first token of the next one.
        for piece in pieces:
            read.update((piece.document, piece.offset + at) for at in range(piece.length))
        read.update((last.document, last.offset + at) for at in range(last.length - 1))
    assert max(read.values()) == 3
    indexed = next(passages(dataset, 0)).indexed
    documents = range(42) if "70" in resolved.config.data.split else range(60)
    tokens = sum(indexed.sizes[number].item() for number in documents)
    assert {document for document, _ in read} <= set(documents)
    left = 3 * tokens - sum(read.values())
    # Less than a batch and, for lazy, less than a sample of each pass.
    assert 0 < left <= 16 * (resolved.run.batch.whole + 3)


def train(folder: str, data_path: str) -> list[tuple[int, str | None]]:
    """Train and stop, resume, then resume with another batch size, and with other data; runs in the rank."""
    from neox_model.parallel.topology import create_groups
    from neox_model.train import open_run

    ended: list[tuple[int, str | None]] = []
    groups, states = create_groups(1, 1), []
    loop = open_run.Loop

    def watched(run, batches):
        states.append(run.state)
        return loop(run, batches)

    open_run.Loop = watched
    save = {"save": f"{folder}/save", "load": f"{folder}/save", "save_interval": 50}
    common = {"data_path": data_path, "split": "70,30,0"} | save
    for more in ({"exit_interval": 20}, {}, {"train_micro_batch_size_per_gpu": 3}):
        resolved = resolved_with(Path(folder), common | more)
        try:
            open_run.train_in(groups, resolved)
            ended.append((states[-1].iteration, None))
        except (NeoXError, DataError) as error:
            ended.append((resolved.config.training.iterations, str(error)))
    other = resolved_with(Path(folder), common)
    for ending in ("idx", "bin"):
        shutil.copy(f"{folder}/other/corpus.{ending}", f"{data_path}.{ending}")
    Path(f"{data_path}.manifest.json").unlink(missing_ok=True)
    try:
        open_run.train_in(groups, other)
    except (NeoXError, DataError) as error:
        ended.append((other.config.training.iterations, str(error)))
    return ended


@pytest.mark.slow
def test_a_training_of_passes_resumes_and_other_batches_or_data_are_refused(tmp_path):
    data_path = write_corpus(tmp_path)
    (tmp_path / "other").mkdir()
    write_smaller_corpus(tmp_path / "other" / "corpus")
    [(stopped, finished, batch, data)] = run_ranks(train, size=1, folder=str(tmp_path), data_path=data_path)
    whole = resolved_with(tmp_path, {"data_path": f"{tmp_path}/other/corpus", "split": "70,30,0"})
    assert stopped == [20, None]
    assert finished[1] is None
    total = finished[0]
    assert whole.config.training.iterations < total
    assert whole.update.decay_iterations == whole.config.training.iterations
    changed = f"the checkpoint of iteration {total} was written with another batch size than 3"
    assert batch[1].startswith(changed)
    assert shows(batch[1], "train-epochs", f"train-iters: {total}")
    assert "read the same" in data[1]


def write_smaller_corpus(prefix: Path) -> None:
    """Write ten documents of a hundred letters."""
    with IndexedDatasetWriter(prefix, dtype=np.uint16) as writer:
        for _ in range(10):
            writer.append(np.arange(100, dtype=np.uint16) % 26 + 97)
