"""Trainings on labels that leave out tokens: the same on every layout, and not affected by masked tokens."""

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from neox_config.facts.checkpoints import checkpoint_name
from neox_data.indexed import IndexedDatasetWriter
from neox_model.checkpoint.contents import Manifest
from support.distributed import run_ranks
from support.settings import SMALL_TRAINING, resolved_from
from support.tiers import slow_except

ITERATIONS = 4
# Plain momentum: Adam would turn the rounding of gradients that are 0 into whole steps.
GLOBAL = {
    "loss_normalization": "global",
    "hidden_dropout": 0.0,
    "train_batch_size": 8,
    "optimizer": {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}},
}
# Layout, data type, and what rounding may change after four updates.
LAYOUTS: dict[str, tuple[dict[str, Any], float]] = {
    "data 2": ({}, 2e-5),
    "tensor 2": ({"model_parallel_size": 2}, 2e-5),
    "pipeline 2": ({"pipe_parallel_size": 2}, 2e-5),
    "data 2, bfloat16": ({"precision": "bfloat16"}, 2e-2),
    "tensor 2, fp16": ({"model_parallel_size": 2, "precision": "fp16"}, 2e-2),
}
FAST = ("data 2",)


def write_labelled(folder: Path, *, replaced: int | None = None) -> dict[str, Any]:
    """Write documents of which the first part does not count, some as a whole; return what names them.

    Args:
        folder: for the files.
        replaced: label to use instead of -100.
    """
    generator = np.random.default_rng(0)
    given: dict[str, Any] = {}
    with (
        IndexedDatasetWriter(folder / "tokens", dtype=np.int32) as tokens,
        IndexedDatasetWriter(folder / "labels", dtype=np.int32) as labels,
    ):
        for number in range(40):
            row = 97 + np.cumsum(generator.choice([1, 1, 1, 5], size=generator.integers(12, 40))) % 26
            masked = len(row) if number % 3 == 0 else int(generator.integers(0, len(row)))
            tokens.append(row.astype(np.int32))
            label = row.copy()
            label[:masked] = -100 if replaced is None else replaced
            labels.append(label.astype(np.int32))
    for part in ("train", "valid", "test"):
        given[f"{part}_data_paths"] = [str(folder / "tokens")]
        given[f"{part}_label_data_paths"] = [str(folder / "labels")]
    return given


def train(save: str, settings: dict[str, Any]) -> dict[str, float]:
    """Train, evaluate at the end, and return the last losses."""
    from neox_model.parallel.topology import create_groups
    from neox_model.train import open_run

    given = SMALL_TRAINING | {"train_iters": ITERATIONS, "save": save, "save_interval": ITERATIONS}
    given |= {"eval_iters": 1, "eval_interval": ITERATIONS, "train_micro_batch_size_per_gpu": 2} | settings
    resolved = resolved_from(
        given | {"gradient_accumulation_steps": None}, devices=int(os.environ["WORLD_SIZE"])
    )
    groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
    found: dict[str, float] = {}
    evaluate = open_run.Evaluator.evaluate

    def noted(self: Any, *given: Any, **options: Any) -> Any:
        result = evaluate(self, *given, **options)
        found[given[0]] = result.loss
        return result

    open_run.Evaluator.evaluate = noted
    try:
        open_run.train_in(groups, resolved)
    finally:
        open_run.Evaluator.evaluate = evaluate
    return found


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the pieces of the weights of a checkpoint, joined along the dimension that is split."""
    folder = folder / checkpoint_name(ITERATIONS)
    manifest = Manifest.read(folder)
    shards = {name: load_file(folder / name) for name in manifest.files}
    found = {}
    for name in manifest.weight_names:
        record = manifest.tensors[name]
        whole = torch.zeros(record.shape)
        for piece in record.pieces:
            view = whole[tuple(slice(*limits) for limits in piece.block)]
            flat = view.reshape(-1).clone()
            flat[piece.start : piece.stop] = shards[piece.file][piece.key].float().reshape(-1)
            view.copy_(flat.view_as(view))
        found[name] = whole
    return found


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, *FAST))
def test_the_loss_over_all_unmasked_tokens_is_the_same_on_every_layout(tmp_path, layout: str) -> None:
    more, tolerance = LAYOUTS[layout]
    data = write_labelled(tmp_path) | GLOBAL | {"pack_impl": "packed"}
    (alone,) = run_ranks(train, size=1, save=str(tmp_path / "one"), settings=data)
    found = run_ranks(train, size=2, save=str(tmp_path / "two"), settings=data | more)
    assert found[0]["valid"] == pytest.approx(alone["valid"], abs=tolerance)
    one, two = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    assert one.keys() == two.keys()
    worst = max(float((one[name] - two[name]).abs().max()) for name in one)
    assert worst <= tolerance


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_batches_without_a_label_change_no_weight_and_have_no_mean_loss(tmp_path, precision: str) -> None:
    settings = write_labelled(tmp_path, replaced=-100)
    with IndexedDatasetWriter(tmp_path / "labels", dtype=np.int32) as labels:
        for row in write_rows(tmp_path):
            labels.append(np.full(len(row), -100, np.int32))
    settings |= {"precision": precision, "weight_decay": 0.0}
    (found,) = run_ranks(train, size=1, save=str(tmp_path / "masked"), settings=settings)
    assert found.keys() == {"valid", "test"}
    assert all(math.isnan(loss) for loss in found.values())
    weights = weights_of(tmp_path / "masked")
    assert all(value.isfinite().all() for value in weights.values())
    assert all(
        (value == value.flatten()[0]).all() for name, value in weights.items() if name.endswith("bias")
    )


def write_rows(folder: Path) -> list[np.ndarray]:
    """Return the rows of the tokens."""
    from neox_data.indexed import open_indexed

    return [np.array(row) for row in open_indexed(folder / "tokens")]
