"""Masked models against a plain float64 reading of their architecture: on layouts, resumed, and in use."""

import math
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import neox_model
from neox_config.errors import ConfigError, NeoXError
from neox_config.facts.checkpoints import checkpoint_name
from neox_data.errors import TokenizerError
from neox_data.indexed import IndexedDatasetWriter
from neox_data.tokenizers import build_tokenizer
from neox_model.convert.checkpoints import Checkpoint
from neox_model.convert.to_hf import to_hf
from neox_model.layers.attention.dense import Core
from neox_model.parallel.groups import SINGLE_PROCESS
from support.distributed import run_ranks
from support.refusals import refused
from support.settings import SMALL_TRAINING, resolved_from
from support.tiers import slow_except
from support.trainings import evaluate_parts_here

ITERATIONS, HEADS, WIDTH, EVALUATED = 4, 4, 16, 2
SETTINGS: dict[str, Any] = SMALL_TRAINING | {
    "objective": "masked",
    "mask_prob": 0.3,
    "short_seq_prob": 0.3,
    "reset_attention_mask": True,
    "loss_normalization": "global",
    "split": "80,20,0",
    "train_iters": ITERATIONS,
    "num_attention_heads": HEADS,
    "hidden_size": WIDTH,
    "hidden_dropout": 0.0,
    "train_batch_size": 8,
    "gradient_accumulation_steps": None,
    "init_method_std": 0.3,
    "optimizer": {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}},
    "zero_allow_untested_optimizer": True,
    "eval_iters": EVALUATED,
    "eval_interval": ITERATIONS,
    "save_interval": 2,
}
# Layout, number of processes, and what rounding may change in a loss.
LAYOUTS: dict[str, tuple[dict[str, Any], int, float]] = {
    "one process": ({}, 1, 1e-5),
    "tensor 2": ({"model_parallel_size": 2}, 2, 1e-5),
    "tensor 2, sequence": ({"model_parallel_size": 2, "sequence_parallel": True}, 2, 1e-5),
    "pipeline 2": ({"pipe_parallel_size": 2, "engine": "deepspeed"}, 2, 1e-5),
    "torch, pipeline 2": ({"pipe_parallel_size": 2, "engine": "torch"}, 2, 1e-5),
    "data 2": ({}, 2, 1e-5),
    "ZeRO 3": ({"zero_optimization": {"stage": 3}, "engine": "deepspeed"}, 2, 1e-5),
    "torch, ZeRO 3": ({"zero_optimization": {"stage": 3}, "engine": "torch"}, 2, 1e-5),
    "torch, pipeline 2, ZeRO 2": (
        {"pipe_parallel_size": 2, "zero_optimization": {"stage": 2}, "engine": "torch"},
        4,
        1e-5,
    ),
    "float16": ({"precision": "fp16"}, 1, 3e-3),
    "bfloat16": ({"precision": "bfloat16"}, 1, 3e-2),
    "tensor 2, bfloat16": ({"model_parallel_size": 2, "precision": "bfloat16"}, 2, 3e-2),
}
FAST = ("one process", "tensor 2", "torch, pipeline 2", "torch, ZeRO 3", "bfloat16")


@pytest.fixture
def data(tmp_path) -> str:
    """Documents that mostly continue with the next letter, each with its end."""
    generator = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "text", dtype=np.uint16) as writer:
        for _ in range(80):
            steps = generator.choice([1, 1, 1, 5], size=generator.integers(5, 60))
            writer.append(np.array([*(97 + np.cumsum(steps) % 26), 0], dtype=np.uint16))
    return str(tmp_path / "text")


def train(parts: list[dict[str, Any]]) -> list[list[tuple[str, int, float]]]:
    """Train each part, one after another; (part, first sample, loss) of their evaluations."""
    from neox_model.parallel.topology import create_groups
    from neox_model.train import open_run

    evaluate, results = open_run.Evaluator.evaluate, []
    for settings in parts:
        found: list[tuple[str, int, float]] = []

        def noted(self: Any, *given: Any, found: Any = found, **options: Any) -> Any:
            result = evaluate(self, *given, **options)
            found.append((*given[:2], result.loss))
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


def weights_of(folder: Path) -> dict[str, Tensor]:
    """The whole weights of the last checkpoint, by logical name."""
    checkpoint = Checkpoint(folder / checkpoint_name(ITERATIONS))
    return {name: checkpoint.whole(name) for name in checkpoint.shapes}


def plain_logits(weights: dict[str, Tensor], tokens_BS: Tensor, ids_BS: Tensor | None) -> Tensor:
    """Logits of the whole model, written out: every token sees all of its document, before and behind it."""
    w = {name: value.double() for name, value in weights.items()}
    batch, length = tokens_BS.shape

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (WIDTH,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    words = w["embedding.word_embeddings.weight"]
    x = words[tokens_BS] + w["embedding.position_embeddings.weight"][:length]
    for layer in range(2):
        name = f"layers.{layer}"
        mixed = linear(norm(x, f"{name}.norm1"), f"{name}.attention.qkv")
        query, key, value = mixed.view(batch, length, HEADS, 3, WIDTH // HEADS).permute(3, 0, 2, 1, 4)
        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        if ids_BS is not None:
            scores = scores.masked_fill((ids_BS[:, :, None] != ids_BS[:, None])[:, None], -math.inf)
        context = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, WIDTH)
        x = x + linear(context, f"{name}.attention.dense")
        hidden = functional.gelu(linear(norm(x, f"{name}.norm2"), f"{name}.mlp.up"))
        x = x + linear(hidden, f"{name}.mlp.down")
    return norm(x, "final_norm") @ words.T


def validation_batches(data: str, first: int = 0):
    """The batches of an evaluation, of one process."""
    from neox_model.train.data.objective import samples_of_objective
    from neox_model.train.data.streams import build_datasets, open_streams

    resolved = resolved_from(SETTINGS | {"data_path": data})
    tokenizer = build_tokenizer("CharLevelTokenizer")
    datasets = samples_of_objective(build_datasets(resolved), resolved.data, tokenizer)
    streams = open_streams(
        resolved.data, resolved.run, datasets, SINGLE_PROCESS, vocab_size=512, end_of_document=0
    )
    with closing(streams["valid"](first)) as stream:
        return [next(stream) for _ in range(EVALUATED * resolved.run.batch.accumulation)]


def plain_loss(weights: dict[str, Tensor], data: str, first: int) -> float:
    """The loss of an evaluation: the mean over all chosen tokens, in their own places."""
    total, count = 0.0, 0.0
    for batch in validation_batches(data, first):
        logits = plain_logits(weights, batch.tokens_BS, batch.document_ids_BS)
        losses = functional.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten(), reduction="none")
        total += float((losses * batch.loss_mask_BS.flatten().double()).sum())
        count += float(batch.loss_mask_BS.sum())
    return total / count


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, *FAST))
def test_the_loss_on_every_layout_is_that_of_a_plain_reading(tmp_path, data, layout):
    more, size, tolerance = LAYOUTS[layout]
    settings = SETTINGS | {"data_path": data, "save": str(tmp_path / "run")} | more
    ((evaluated,), *_) = run_ranks(train, size=size, parts=[settings])
    weights = weights_of(tmp_path / "run")
    parts = [(first, loss) for part, first, loss in evaluated if part == "valid"]
    assert parts
    for first, loss in parts:
        assert loss == pytest.approx(plain_loss(weights, data, first), abs=tolerance)


def test_masks_and_weights_of_layouts_are_those_of_one_process(tmp_path, data):
    """The same losses of the same samples: what tensor 2 and data 2 train is what one process trains."""
    found = {}
    for layout in ("one process", "tensor 2", "data 2"):
        more, size, _ = LAYOUTS[layout]
        settings = SETTINGS | {"data_path": data, "save": str(tmp_path / layout)} | more
        run_ranks(train, size=size, parts=[settings])
        found[layout] = weights_of(tmp_path / layout)
    for layout in ("tensor 2", "data 2"):
        for name, value in found["one process"].items():
            torch.testing.assert_close(found[layout][name], value, atol=2e-5, rtol=0)


def test_a_causal_layer_is_found_by_the_plain_reading(tmp_path, data, monkeypatch):
    settings = SETTINGS | {"data_path": data, "save": str(tmp_path / "run")}
    run_ranks(train, size=1, parts=[settings])
    model = neox_model.load_model(tmp_path / "run")
    weights = weights_of(tmp_path / "run")
    tokens = torch.tensor([list(b"abcdefgh")])
    with torch.no_grad():
        found = model.module(tokens)
    expected = plain_logits(weights, tokens, None)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    for module in model.module.modules():
        if isinstance(module, Core):
            monkeypatch.setattr(module, "is_causal", True)
    with torch.no_grad():
        assert float((model.module(tokens) - expected).abs().max()) > 1e-2


@pytest.mark.parametrize("size", [1, 2])
def test_a_resumed_training_is_an_uninterrupted_one(tmp_path, data, size):
    settings = SETTINGS | {"data_path": data, "hidden_dropout": 0.1}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    halves = [
        settings | {"save": str(parts), "load": str(parts), "train_iters": 2, "lr_decay_iters": ITERATIONS},
        settings | {"save": str(parts), "load": str(parts), "lr_decay_iters": ITERATIONS},
    ]
    uninterrupted = settings | {"save": str(whole), "lr_decay_iters": ITERATIONS}
    run_ranks(train, size=size, parts=[uninterrupted, *halves])
    one, other = (weights_of(folder) for folder in (whole, parts))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_masked_model_has_logits_and_generates_nothing(tmp_path, data):
    run_ranks(train, size=1, parts=[SETTINGS | {"data_path": data, "save": str(tmp_path / "run")}])
    model = neox_model.load_model(tmp_path / "run")
    assert model.settings["objective"] == "masked"
    assert model.logits("abc").shape == (3, 512)
    with refused(ConfigError, "cannot continue texts"):
        model.generate("abc")
    with refused(NeoXError, "objective: masked"):
        to_hf(tmp_path / "run" / checkpoint_name(ITERATIONS), tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_an_evaluation_is_that_of_the_hidden_tokens(tmp_path, data):
    settings = SETTINGS | {"data_path": data, "save": str(tmp_path / "run"), "load": str(tmp_path / "run")}
    run_ranks(train, size=1, parts=[settings])
    (line,) = run_ranks(evaluate_parts_here, size=1, settings=settings)
    first = EVALUATED * settings["train_batch_size"]
    losses = [plain_loss(weights_of(tmp_path / "run"), data, place) for place in (0, first)]
    assert any(line.startswith(f"validation loss {loss:.4f}, ") for loss in losses), (line, losses)


def test_a_causal_model_is_another_one_whose_weights_may_be_used(tmp_path, data):
    folder = str(tmp_path / "causal")
    settings = SETTINGS | {"data_path": data, "load": folder}
    run_ranks(train, size=1, parts=[settings | {"save": folder, "objective": "causal"}])
    with refused(Exception, "the checkpoint, masked"):
        run_ranks(train, size=1, parts=[settings | {"save": str(tmp_path / "run")}])
    given = settings | {"save": str(tmp_path / "run"), "finetune": True, "optimizer": SETTINGS["optimizer"]}
    ((evaluated,),) = run_ranks(train, size=1, parts=[given])
    assert all(math.isfinite(loss) for _, _, loss in evaluated)
    assert neox_model.load_model(tmp_path / "run").settings["objective"] == "masked"


def test_a_tokenizer_without_a_mask_token_ends_a_training_before_it_starts(tmp_path, data):
    settings = SETTINGS | {"data_path": data, "save": str(tmp_path / "run"), "mask_token": "<no such token>"}
    with refused(Exception, "mask-token", "'<no", "token>'") as found:
        run_ranks(train, size=1, parts=[settings])
    assert TokenizerError.__name__ in str(found.value)
    assert not list((tmp_path / "run").rglob("*.safetensors"))
