"""Retrieval models against a plain float64 reading: on layouts, resumed, and from a masked model."""

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import neox_model
from neox_config.errors import NeoXError
from support.distributed import run_ranks
from support.refusals import refused
from support.retrieval import ITERATIONS, MODEL, SETTINGS, plain_embeddings, weights_of, write_letters
from support.settings import SMALL_TRAINING, resolved_from
from support.tiers import slow_except
from support.trainings import evaluate_parts_here

_BUFFERED: dict[str, Any] = {
    "model_parallel_size": 2,
    "checkpoint_activations": True,
    "partition_activations": True,
    "contiguous_checkpointing": True,
}
# Layout, number of processes, and what rounding may change in a loss.
LAYOUTS: dict[str, tuple[dict[str, Any], int, float]] = {
    "one process": ({}, 1, 1e-4),
    "shared": ({"ict_shared_towers": True}, 1, 1e-4),
    "data 2": ({}, 2, 1e-4),
    "shared, data 2": ({"ict_shared_towers": True}, 2, 1e-4),
    "data 2, DeepSpeed": ({"engine": "deepspeed"}, 2, 1e-4),
    "tensor 2": ({"model_parallel_size": 2}, 2, 1e-4),
    "tensor 2, sequence": ({"model_parallel_size": 2, "sequence_parallel": True}, 2, 1e-4),
    "tensor 2, data 2": ({"model_parallel_size": 2}, 4, 1e-4),
    "ZeRO 1": ({"zero_optimization": {"stage": 1}, "engine": "torch"}, 2, 1e-4),
    "ZeRO 3": ({"zero_optimization": {"stage": 3}, "engine": "torch"}, 2, 1e-4),
    "ZeRO 3, DeepSpeed": ({"zero_optimization": {"stage": 3}, "engine": "deepspeed"}, 2, 1e-4),
    "recomputed": ({"checkpoint_activations": True}, 2, 1e-4),
    "recomputed from one buffer": (_BUFFERED, 2, 1e-4),
    "recomputed from one buffer, shared": (_BUFFERED | {"ict_shared_towers": True}, 2, 1e-4),
    "bfloat16": ({"precision": "bfloat16"}, 2, 0.1),
    "float16": ({"precision": "fp16"}, 2, 2e-2),
}
FAST = ("one process", "shared", "data 2", "tensor 2, sequence", "ZeRO 3", "float16")


@pytest.fixture
def data(tmp_path) -> str:
    return write_letters(tmp_path / "text")


def train(parts: list[dict[str, Any]]) -> list[list[tuple[str, int, float, dict[int, float]]]]:
    """Train each part, one after another; (part, first sample, loss, accuracies) of their evaluations."""
    from neox_model.parallel.topology import create_groups
    from neox_model.train import open_run

    evaluate, results = open_run.Evaluator.evaluate, []
    for settings in parts:
        found: list[tuple[str, int, float, dict[int, float]]] = []

        def noted(self: Any, *given: Any, found: Any = found, **options: Any) -> Any:
            result = evaluate(self, *given, **options)
            found.append((*given[:2], result.loss, dict(result.accuracies)))
            return result

        resolved = resolved_from(settings, devices=int(os.environ["WORLD_SIZE"]))
        groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
        open_run.Evaluator.evaluate = noted
        try:
            open_run.train_in(groups, resolved)
        finally:
            open_run.Evaluator.evaluate = evaluate
        results.append(found)
    return results


def plain_evaluation(
    weights: dict[str, Tensor], settings: dict[str, Any], first: int
) -> tuple[float, dict[int, float]]:
    """The loss and the accuracies of an evaluation: each batch of eight against its own blocks."""
    from neox_model.train.data.streams import build_datasets

    dataset = build_datasets(resolved_from(settings))["valid"]
    losses, hits = [], {1: 0.0, 3: 0.0}
    for start in (first, first + 8):
        rows = torch.from_numpy(np.stack([dataset[item] for item in range(start, start + 8)]))
        scores = (
            plain_embeddings(weights, rows[:, 0], "query") @ plain_embeddings(weights, rows[:, 1], "block").T
        )
        losses.append(-scores.log_softmax(1).diagonal().mean())
        for k in hits:
            better = (scores >= scores.diagonal()[:, None]).sum(1) - 1
            hits[k] += float((better < k).sum()) / 16
    return float(sum(losses)) / 2, hits


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, *FAST))
def test_the_loss_on_every_layout_is_that_of_a_plain_reading(tmp_path, data, layout):
    more, size, tolerance = LAYOUTS[layout]
    settings = SETTINGS | {"data_path": data, "save": str(tmp_path / "run")} | more
    ((evaluated,), *_) = run_ranks(train, size=size, parts=[settings])
    weights = weights_of(tmp_path / "run")
    parts = [each for each in evaluated if each[0] == "valid"]
    assert parts
    for _, first, loss, accuracies in parts:
        wanted, hits = plain_evaluation(weights, SETTINGS | {"data_path": data}, first)
        assert loss == pytest.approx(wanted, abs=tolerance)
        if tolerance < 1e-3:
            assert {int(k): share for k, share in accuracies.items()} == pytest.approx(hits)


@pytest.mark.slow
def test_ranks_train_what_one_process_trains(tmp_path, data):
    """The blocks of all ranks are compared with all queries, and the gradients of both reach their ranks."""
    found = {}
    for layout in ("one process", "data 2", "tensor 2, data 2", "ZeRO 3"):
        more, size, _ = LAYOUTS[layout]
        settings = SETTINGS | {"data_path": data, "save": str(tmp_path / layout)} | more
        run_ranks(train, size=size, parts=[settings])
        found[layout] = weights_of(tmp_path / layout)
    for layout in found:
        assert found[layout].keys() == found["one process"].keys()
        for name, value in found["one process"].items():
            torch.testing.assert_close(found[layout][name], value, atol=2e-5, rtol=0)


@pytest.mark.parametrize("size", [1, 2])
def test_a_resumed_training_is_an_uninterrupted_one(tmp_path, data, size):
    settings = SETTINGS | {"data_path": data, "hidden_dropout": 0.1, "lr_decay_iters": ITERATIONS}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    halves = [
        settings | {"save": str(parts), "load": str(parts), "train_iters": 2},
        settings | {"save": str(parts), "load": str(parts)},
    ]
    run_ranks(train, size=size, parts=[settings | {"save": str(whole)}, *halves])
    one, other = (weights_of(folder) for folder in (whole, parts))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"ict_shared_towers": True},
        {"model_parallel_size": 2},
        {"zero_optimization": {"stage": 3}, "engine": "torch"},
    ],
)
def test_towers_start_with_the_weights_of_a_masked_model(tmp_path, data, more):
    masked = {
        name: value for name, value in SETTINGS.items() if "ict" not in str(name) and "topk" not in name
    }
    masked |= {"objective": "masked", "data_path": data, "save": str(tmp_path / "bert")}
    run_ranks(train, size=1, parts=[masked])
    given = {"data_path": data, "bert_load": str(tmp_path / "bert"), "save": str(tmp_path / "run")}
    # Without a step that changes them, the saved weights are those of the start.
    still = {"optimizer": {"type": "SGD", "params": {"lr": 1e-12}}, "train_iters": 1, "save_interval": 1}
    run_ranks(
        train,
        size=2 if more and "ict_shared_towers" not in more else 1,
        parts=[SETTINGS | given | still | more],
    )
    bert, towers = weights_of(tmp_path / "bert"), weights_of(tmp_path / "run", 1)
    prefixes = ("",) if "ict_shared_towers" in more else ("query.", "block.")
    of_encoder = {name for name in bert if not name.startswith("lm_head")}
    heads = {f"{prefix}retrieval_head.{part}" for prefix in prefixes for part in ("weight", "bias")}
    assert set(towers) == heads | {prefix + name for prefix in prefixes for name in of_encoder}
    for prefix in prefixes:
        for name in of_encoder:
            torch.testing.assert_close(towers[prefix + name], bert[name], atol=1e-9, rtol=0)


def test_a_training_that_continues_does_not_read_the_masked_model(tmp_path, data):
    masked = {
        name: value for name, value in SETTINGS.items() if "ict" not in str(name) and "topk" not in name
    }
    run = {"save": str(tmp_path / "run"), "load": str(tmp_path / "run"), "data_path": data}
    given = SETTINGS | run | {"bert_load": str(tmp_path / "bert")}
    bert = masked | {"objective": "masked", "data_path": data, "save": str(tmp_path / "bert")}
    run_ranks(train, size=1, parts=[bert, given | {"train_iters": 2, "lr_decay_iters": ITERATIONS}])
    (tmp_path / "bert").rename(tmp_path / "moved")
    run_ranks(train, size=1, parts=[given | {"lr_decay_iters": ITERATIONS}])
    assert weights_of(tmp_path / "run")


def test_a_model_of_another_kind_is_no_start_for_towers(tmp_path, data):
    causal = SMALL_TRAINING | MODEL | {"data_path": data, "save": str(tmp_path / "gpt")}
    causal |= {"train_iters": 1, "save_interval": 1}
    run_ranks(train, size=1, parts=[causal])
    given = {"data_path": data, "bert_load": str(tmp_path / "gpt"), "save": str(tmp_path / "run")}
    with refused(Exception, "one with objective"):
        run_ranks(train, size=1, parts=[SETTINGS | given])
    with refused(Exception, "bert-load"):
        run_ranks(train, size=1, parts=[SETTINGS | given | {"bert_load": str(tmp_path / "nothing")}])


def test_an_evaluation_reports_accuracies_and_the_model_has_no_logits(tmp_path, data):
    settings = SETTINGS | {"data_path": data, "save": str(tmp_path / "run"), "load": str(tmp_path / "run")}
    run_ranks(train, size=1, parts=[settings])
    (found,) = run_ranks(evaluate_parts_here, size=1, settings=settings)
    wanted = [plain_evaluation(weights_of(tmp_path / "run"), settings, first) for first in (0, 16)]
    lines = [f"validation loss {loss:.4f}, perplexity" for loss, _ in wanted]
    assert any(found.startswith(line) for line in lines), (found, lines)
    shares = [f"top 1 accuracy {hits[1]:.1%}, top 3 accuracy {hits[3]:.1%}" for _, hits in wanted]
    assert any(share in found for share in shares), (found, shares)
    with refused(NeoXError, "over a vocabulary"):
        neox_model.load_model(tmp_path / "run")
