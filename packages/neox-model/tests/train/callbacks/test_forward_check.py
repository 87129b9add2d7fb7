"""The output of a forward pass, saved with a checkpoint, is that of the loaded model on every layout."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neox_data.indexed import IndexedDatasetWriter
from neox_data.tokenizers.char_level import CharLevelTokenizer
from neox_model.checkpoint.errors import CheckpointError
from neox_model.train.callbacks.forward_check import ForwardCheck
from support.distributed import run_ranks
from support.refusals import refused
from support.settings import SMALL_TRAINING, resolved_from


def check_of(loss, *, digest="first", precision="bf16"):
    return ForwardCheck(lambda: loss, lambda: digest, samples=4, computes_in=precision)


def test_another_loss_is_refused_and_an_unknown_one_is_reported(caplog):
    check = check_of(2.0)
    saved = check.result()
    for loss in (2.0, 2.001):
        check.compare(saved | {"loss": loss}, source="here")
    for loss in (2.01, 1.9, math.nan):
        with refused(CheckpointError, "loss 2"):
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
        "its loss is a mean over micro-batches, as an older version computed it",
    ]


@pytest.mark.parametrize(("before", "now"), [("bf16", "fp32"), ("fp32", "fp16")])
def test_the_tolerance_is_the_larger_one_of_both_precisions(before, now):
    saved = check_of(2.0, precision=before).result()
    check_of(2.003, precision=now).compare(saved, source="here")
    exact = check_of(2.0, precision="fp32").result()
    with refused(CheckpointError, "checkpoint-validation-with-forward-pass"):
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


# After four updates the weights of all replicas are the same, after eight the next average is far away.
LOCAL: dict[str, Any] = SETTINGS | {
    "fp16": {},
    "eod_mask_loss": False,
    "optimizer": {
        "type": "ZeroOneAdam",
        "params": {
            "lr": 0.01,
            "eps": 1e-3,
            "var_freeze_step": 1,
            "var_update_scaler": 1,
            "local_step_scaler": 1,
            "local_step_clipper": 64,
        },
    },
}
REPLICAS: dict[str, dict[str, Any]] = {
    "synchronized": {},
    "two replicas": {},
    "other samples for each": {"train_micro_batch_size_per_gpu": 4},
    "one replica": {"model_parallel_size": 2},
    "weights alone": {"model_parallel_size": 2, "no_load_optim": True},
}


def train(
    folder: str, data_path: str, layouts: dict[str, Any], settings: dict[str, Any], iterations: int = 2
) -> dict[str, str]:
    """Train `iterations`, then as many on one layout after another; runs in both ranks."""
    import torch

    from neox_model.parallel.topology import create_groups
    from neox_model.train import loading, open_run
    from support.worlds import world_of

    load, ended, heard = loading.load_checkpoint, {}, []
    forward_logger = logging.getLogger("neox_model.train.callbacks.forward_check")
    forward_logger.setLevel(logging.INFO)
    forward_logger.addFilter(lambda record: heard.append(record.getMessage()) or True)

    def load_and_damage(directory, parts, **settings):
        found = load(directory, parts, **settings)
        with torch.no_grad():
            for parameter in parts.engine.model.parameters():
                parameter.mul_(2.0)
        return found

    for number, (name, layout) in enumerate({"first": {}, **layouts}.items()):
        save = str(Path(folder, "save"))
        files = {
            "data_path": data_path,
            "save": save,
            "load": save,
            "exit_interval": iterations * (number + 1),
        }
        resolved = resolved_from(settings | files | layout, devices=2)
        loading.load_checkpoint = load_and_damage if name == "damaged" else load
        with world_of(2, Path(folder), name=name):
            groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
            try:
                open_run.train_in(groups, resolved)
                ended[name] = heard.pop() if heard else ""
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
    first, second = run_ranks(
        train,
        size=2,
        folder=str(tmp_path),
        data_path=corpus_with_ends(tmp_path),
        layouts=LAYOUTS,
        settings=SETTINGS,
    )
    assert first == second
    damaged = first.pop("damaged")
    assert first.pop("first") == ""
    assert all("as when it was saved" in text for text in first.values()), first
    assert damaged.startswith(f"the model loaded from {tmp_path / 'save'}, iteration 10 has the loss")
    batches = set()
    for iteration in (2, 4, 6, 8, 10):
        manifest = tmp_path / "save" / f"global_step{iteration}" / "manifest.json"
        result = json.loads(manifest.read_text())["contents"]["training"]["forward_pass"]
        batches.add(result["batch"])
        assert result["samples"] == 8
        assert 1 < result["loss"] < 7
    assert len(batches) == 1


@pytest.mark.slow
def test_between_averages_of_replicas_the_weights_of_the_checkpoint_are_compared(tmp_path):
    found, _ = run_ranks(
        train,
        size=2,
        folder=str(tmp_path),
        data_path=corpus_with_ends(tmp_path),
        layouts=REPLICAS,
        settings=LOCAL,
        iterations=4,
    )
    assert found.pop("first") == ""
    assert found.keys() == REPLICAS.keys()
    assert all("as when it was saved" in text for text in found.values()), found
    for iteration, is_local in {4: False, 8: True, 16: True}.items():
        manifest = json.loads((tmp_path / f"save/global_step{iteration}/manifest.json").read_text())
        assert ("final_norm.weight/local_update" in manifest["contents"]["tensors"]) == is_local
