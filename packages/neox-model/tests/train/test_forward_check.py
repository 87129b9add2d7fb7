"""The output of a forward pass, saved with a checkpoint, is that of the loaded model on every layout."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neox_data.indexed import IndexedDatasetWriter
from neox_data.tokenizers.char_level import CharLevelTokenizer
from neox_model.checkpoint.errors import CheckpointError
from neox_model.train.forward_check import ForwardCheck
from support.distributed import run_ranks
from support.settings import SMALL_TRAINING, resolved_from


def check_of(loss, *, digest="first", precision="bf16"):
    return ForwardCheck(lambda: loss, lambda: digest, samples=4, computes_in=precision)


def test_another_loss_is_refused_and_an_unknown_one_is_reported(caplog):
    check = check_of(2.0)
    saved = check.result()
    for loss in (2.0, 2.001):
        check.compare(saved | {"loss": loss}, source="here")
    for loss in (2.01, 1.9, math.nan):
        with pytest.raises(CheckpointError, match=r"the model loaded from here has the loss 2 .* to use it"):
            check.compare(saved | {"loss": loss}, source="here")
    for unknown in (
        None,
        saved | {"samples": 8, "loss": 5.0},
        saved | {"batch": "other", "loss": 5.0},
        saved | {"micro_batch": 2, "loss": 5.0},
    ):
        check.compare(unknown, source="here")
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.rpartition(": ")[2] for text in texts] == [
        "it contains no result",
        "the batch size has changed",
        "the first batch of the training data has changed",
        "its loss is a mean over micro-batches, which have changed",
    ]


def test_the_mean_over_different_models_is_compared_with_that_of_as_many(caplog):
    def check_of_models(models):
        return ForwardCheck(lambda: 2.0, lambda: "x", samples=4, computes_in="fp32", models=lambda: models)

    saved = check_of_models(2).result() | {"loss": 3.0}
    with pytest.raises(CheckpointError, match="has the loss 2"):
        check_of_models(2).compare(saved, source="here")
    for models in (1, 3):
        check_of_models(models).compare(saved, source="here")
    assert caplog.text.count("replicas had different weights, and there was another number of them") == 2
    # Results of before have no number: the replicas had one model.
    saved.pop("models")
    with pytest.raises(CheckpointError, match="has the loss 2"):
        check_of_models(1).compare(saved, source="here")


@pytest.mark.parametrize(("before", "now"), [("bf16", "fp32"), ("fp32", "fp16")])
def test_the_tolerance_is_the_larger_one_of_both_precisions(before, now):
    saved = check_of(2.0, precision=before).result()
    check_of(2.003, precision=now).compare(saved, source="here")
    exact = check_of(2.0, precision="fp32").result()
    with pytest.raises(CheckpointError, match="checkpoint-validation-with-forward-pass: false"):
        check_of(2.003, precision="fp32").compare(exact, source="here")


SETTINGS: dict[str, Any] = SMALL_TRAINING | {
    "save_interval": 2,
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": None,
    "checkpoint_validation_with_forward_pass": True,
    "train_iters": 20,
    "fp16": {"enabled": True},
    # Micro-batches have different numbers of tokens in the loss.
    "eod_mask_loss": True,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"model_parallel_size": 2},
    "pipeline": {"pipe_parallel_size": 2},
    "micro-batch": {"train_micro_batch_size_per_gpu": 1},
    "data": {"zero_optimization": {"stage": 3}, "fp16": {}, "precision": "bfloat16"},
    "damaged": {"model_parallel_size": 2},
}


def train(folder: str, data_path: str) -> dict[str, str]:
    """Train two iterations, then resume on one layout after another; runs in both ranks."""
    import torch

    from neox_model.parallel.topology import create_groups
    from neox_model.train import loading, run
    from support.worlds import world_of

    load, ended = loading.load_checkpoint, {}

    def load_and_damage(directory, parts, **settings):
        found = load(directory, parts, **settings)
        with torch.no_grad():
            for parameter in parts.engine.model.parameters():
                parameter.mul_(2.0)
        return found

    for number, (name, settings) in enumerate({"first": {}, **LAYOUTS}.items()):
        save = str(Path(folder, "save"))
        files = {"data_path": data_path, "save": save, "load": save, "exit_interval": 2 * number + 2}
        resolved = resolved_from(SETTINGS | files | settings, devices=2)
        loading.load_checkpoint = load_and_damage if name == "damaged" else load
        with world_of(2, Path(folder), name=name):
            groups = create_groups(resolved.derived.model_parallel_size, resolved.derived.pipe_parallel_size)
            try:
                run.train_in(groups, resolved)
                ended[name] = ""
            except CheckpointError as error:
                ended[name] = str(error)
    loading.load_checkpoint = load
    return ended


def corpus_with_ends(folder: Path) -> str:
    """Write documents that consist of ends of documents in irregular places."""
    generator = np.random.default_rng(0)
    prefix = folder / "corpus"
    with IndexedDatasetWriter(prefix, dtype=np.uint16) as writer:
        for share in generator.uniform(0, 0.9, size=40):
            letters = generator.integers(97, 123, size=80)
            letters[generator.random(80) < share] = CharLevelTokenizer().end_of_document
            writer.append(letters.astype(np.uint16))
    return str(prefix)


@pytest.mark.slow
def test_every_layout_loads_the_model_that_was_saved_and_a_changed_weight_is_found(tmp_path):
    first, second = run_ranks(train, size=2, folder=str(tmp_path), data_path=corpus_with_ends(tmp_path))
    assert first == second
    damaged = first.pop("damaged")
    assert set(first.values()) == {""}
    assert damaged.startswith(f"the model loaded from {tmp_path / 'save'}, iteration 10 has the loss")
    batches = set()
    for iteration in (2, 4, 6, 8, 10):
        manifest = tmp_path / "save" / f"global_step{iteration}" / "manifest.json"
        result = json.loads(manifest.read_text())["contents"]["training"]["forward_pass"]
        batches.add(result["batch"])
        assert result["samples"] == 8
        assert 1 < result["loss"] < 7
    assert len(batches) == 1
