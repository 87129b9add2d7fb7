"""The launcher refuses exactly the data of which neox-data can use no document."""

import numpy as np
import pytest

from neox_config import Text, load_config
from neox_data.errors import DataError
from neox_data.indexed import IndexedDatasetWriter, open_indexed
from neox_data.samples.whole_documents import IGNORED
from neox_data.whole_dataset import WholeDocumentDataset
from neox_launcher.plan.usable_documents import trained_documents
from support.tiers import slow_except

SEQ_LENGTH = 5
SETTINGS = """\
num-layers: 1
hidden-size: 8
num-attention-heads: 1
seq-length: 5
max-position-embeddings: 5
train-iters: 1
eval-iters: 0
train-micro-batch-size-per-gpu: 1
optimizer: {type: Adam, params: {lr: 0.001}}
train-data-paths: [tokens]
valid-data-paths: [tokens]
test-data-paths: [tokens]
"""
WITH_LABELS = "".join(f"{part}-label-data-paths: [labels]\n" for part in ("train", "valid", "test"))


def write(prefix: str, rows: list[list[int]]) -> None:
    with IndexedDatasetWriter(prefix, dtype=np.int32) as writer:
        for row in rows:
            writer.append(row)


def random_labels(random: np.random.RandomState, size: int) -> list[int]:
    """Return labels of which at most one counts: at any place, also at the ends of a sample."""
    labels = [IGNORED] * size
    if size and random.randint(2):
        labels[random.randint(size)] = 7
    return labels


PACKINGS = ("unpacked", "pack_until_overflow", "best_fit")


@pytest.mark.parametrize("allow_chopped", [True, False])
@pytest.mark.parametrize("has_labels", [True, False])
@pytest.mark.parametrize("pack_impl", slow_except(PACKINGS, "unpacked"))
def test_data_is_refused_if_no_whole_document_can_be_used(
    tmp_path, monkeypatch, pack_impl, has_labels, allow_chopped
):
    monkeypatch.chdir(tmp_path)
    options = f"pack-impl: {pack_impl}\nallow-chopped: {str(allow_chopped).lower()}\n"
    text = SETTINGS + options + (WITH_LABELS if has_labels else "")
    config = load_config([], texts=[Text(text, "small.yml")])
    random, seen = np.random.RandomState(0), set()
    for _ in range(60):
        sizes = random.randint(0, SEQ_LENGTH + 5, size=random.randint(1, 3)).tolist()
        write("tokens", [[1] * size for size in sizes])
        write("labels", [random_labels(random, size) for size in sizes])
        try:
            WholeDocumentDataset(
                open_indexed("tokens"),
                labels=open_indexed("labels") if has_labels else None,
                name="train",
                documents=np.arange(len(sizes)),
                num_samples=1,
                seq_length=SEQ_LENGTH,
                seed=0,
                pack_impl=pack_impl,
                allow_chopped=allow_chopped,
                prefix="tokens",
            )
            can_be_used = True
        except DataError:
            can_be_used = False
        assert (not list(trained_documents(config))) == can_be_used, sizes
        seen.add(can_be_used)
    assert seen == {True, False}
