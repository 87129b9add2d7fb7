"""Averages of weights: those of the formula in float64 on every layout, resumed exactly, evaluated, read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from neox_config.facts.checkpoints import checkpoint_name
from neox_model.checkpoint.errors import CheckpointError
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.settings import SMALL_TRAINING
from support.tiers import slow_except
from support.trainings import evaluate_parts_here, tensors_of, train_all

DECAY, ITERATIONS = 0.6, 5
SETTINGS: dict[str, Any] = {
    "ema_decay": DECAY,
    "train_iters": ITERATIONS,
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": None,
    "hidden_dropout": 0.0,
    # Biases of keys have no gradient but rounding, which eps keeps small.
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "eps": 1e-3}},
    "save_interval": 1,
    "extra_save_iters": [0],
    "split": "80,10,10",
    "eval_iters": 1,
    "eval_interval": 2,
    # One of the rows of the vocabulary is padding on one of two tensor-parallel ranks.
    "make_vocab_size_divisible_by": 19,
}
EVALUATED = SMALL_TRAINING | SETTINGS | {"extra_save_iters": None, "save_interval": None}
ALONE: dict[str, dict[str, Any]] = {
    "one process": {},
    "every second": {"ema_interval": 2},
    "bf16": {"precision": "bfloat16"},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 64}},
    "recomputed": {"checkpoint_activations": True},
}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"model_parallel_size": 2, "sequence_parallel": True},
    "tied pipeline": {"pipe_parallel_size": 2, "no_weight_tying": False},
    "zero 1": {"zero_optimization": {"stage": 1}},
    "zero 3": {"zero_optimization": {"stage": 3}},
    "bf16 and zero 3": {"precision": "bfloat16", "zero_optimization": {"stage": 3}},
    "deepspeed zero 1": {
        "engine": "deepspeed",
        "precision": "bfloat16",
        "zero_optimization": {"stage": 1},
    },
    "deepspeed zero 3": {
        "engine": "deepspeed",
        "precision": "bfloat16",
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    },
}


def weights_of(folder: Path, iteration: int) -> dict[str, np.ndarray]:
    found = tensors_of(folder, iteration)
    return {name: value.numpy() for name, value in found.items() if "/" not in name}


def averages_of(folder: Path, iteration: int) -> dict[str, np.ndarray]:
    found = tensors_of(folder, iteration)
    return {
        name.removeprefix("model/").removesuffix("/ema"): value.numpy()
        for name, value in found.items()
        if name.endswith("/ema")
    }


def expected(folder: Path, iteration: int, *, interval: int = 1) -> dict[str, np.ndarray]:
    """Return the averages after an iteration, in float64, from the weights of all checkpoints."""
    found = weights_of(folder, 0)
    for number in range(interval, iteration + 1, interval):
        now = weights_of(folder, number)
        found = {name: DECAY * old + (1 - DECAY) * now[name] for name, old in found.items()}
    return found


def trained(folder: Path, *, size: int, **runs: dict[str, Any]) -> None:
    trainings = {name: SETTINGS | {"log_dir": str(folder / name)} | given for name, given in runs.items()}
    run_ranks(train_all, size=size, folder=str(folder), corpus=write_corpus(folder), trainings=trainings)


def metrics_of(folder: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        found.setdefault(record["iteration"], {}).update(record)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("averages")
    without = {"ema_decay": None, "train_iters": 2}
    trained(folder, size=1, **ALONE, without=without)
    return folder


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("averages of two")
    trained(folder, size=2, **TWO_RANKS)
    return folder


def check_formula(folder: Path, *, interval: int = 1) -> None:
    for iteration in (0, 1, ITERATIONS):
        found, right = averages_of(folder, iteration), expected(folder, iteration, interval=interval)
        assert found.keys() == right.keys()
        for name, values in right.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-6, atol=1e-6, err_msg=name)
    moved = weights_of(folder, ITERATIONS)
    assert max(np.abs(moved[name] - values).max() for name, values in right.items()) > 1e-3


@pytest.mark.parametrize("name", slow_except(ALONE, "one process", "every second"))
def test_averages_are_those_of_the_formula(alone, name):
    check_formula(alone / name, interval=ALONE[name].get("ema_interval", 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_RANKS)
def test_averages_on_two_ranks_are_those_of_the_formula(together, name):
    check_formula(together / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data", "tensor", "zero 1", "zero 3"])
def test_two_ranks_have_the_averages_of_one(alone, together, name):
    found, right = (averages_of(folder, ITERATIONS) for folder in (together / name, alone / "one process"))
    assert found.keys() == right.keys()
    for key, values in right.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-3, atol=2e-4, err_msg=key)


@pytest.mark.slow
def test_zero_3_has_the_averages_and_evaluations_of_zero_0(together):
    for key, values in averages_of(together / "data", ITERATIONS).items():
        np.testing.assert_allclose(averages_of(together / "zero 3", ITERATIONS)[key], values, atol=1e-6)
    losses = [metrics_of(together / name)[4]["loss/validation_ema"] for name in ("data", "zero 3")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_resumed_training_has_the_weights_and_averages_of_an_uninterrupted_one(alone, tmp_path):
    trained(tmp_path, size=1, resumed={"load": str(alone / "one process" / checkpoint_name(2))})
    found, right = (
        tensors_of(folder, ITERATIONS) for folder in (tmp_path / "resumed", alone / "one process")
    )
    assert found.keys() == right.keys()
    assert [name for name, values in right.items() if not torch.equal(values, found[name])] == []


def test_averages_that_a_checkpoint_lacks_begin_with_its_weights(alone, tmp_path):
    load = str(alone / "without" / checkpoint_name(2))
    trained(tmp_path, size=1, begun={"load": load, "train_iters": 3, "override_lr_scheduler": True})
    before, after = weights_of(alone / "without", 2), weights_of(tmp_path / "begun", 3)
    for name, values in averages_of(tmp_path / "begun", 3).items():
        np.testing.assert_allclose(values, DECAY * before[name] + (1 - DECAY) * after[name], atol=1e-6)


def test_evaluations_of_averages_are_those_of_a_model_that_has_them(alone):
    metrics = metrics_of(alone / "one process")
    plain, averaged = (metrics[ITERATIONS][f"loss/{name}"] for name in ("test", "test_ema"))
    assert plain != averaged
    assert metrics[2].keys() >= {"loss/validation", "loss/validation_ema", "perplexity/validation_ema"}
    load = {"load": str(alone / "one process"), "data_path": write_corpus(alone)}
    for load_ema, loss in ((False, plain), (True, averaged)):
        found = evaluate_parts_here(EVALUATED | load | {"load_ema": load_ema})
        assert f"test loss {loss:.4f}" in found


def test_an_evaluation_leaves_weights_and_averages_as_they_were(alone, tmp_path):
    trained(tmp_path, size=1, plain={"eval_iters": 0, "split": "80,10,10"})
    found, right = (tensors_of(folder, ITERATIONS) for folder in (tmp_path / "plain", alone / "one process"))
    assert [name for name, values in right.items() if not torch.equal(values, found[name])] == []


def test_a_new_training_can_begin_with_averages_and_not_without_them(alone, tmp_path):
    begun = {"load": str(alone / "one process"), "finetune": True, "load_ema": True, "train_iters": 1}
    trained(tmp_path, size=1, begun=begun)
    right = averages_of(alone / "one process", ITERATIONS)
    for found in (weights_of(tmp_path / "begun", 0), averages_of(tmp_path / "begun", 0)):
        assert all(np.array_equal(found[name], values) for name, values in right.items())
    load = {"load": str(alone / "without"), "data_path": write_corpus(alone), "load_ema": True}
    with pytest.raises(CheckpointError, match="no averages"):
        evaluate_parts_here(EVALUATED | load)
