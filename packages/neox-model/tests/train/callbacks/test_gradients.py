"""Norms of gradients and the noise scale: of whole tensors, the same on every layout without ZeRO."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from neox_data.tokenizers import build_tokenizer
from neox_model.convert.checkpoints import tensor_shapes
from neox_model.optim.gradient_norm import share_of_zeros, shares_of_zeros
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.parallel.logical import logical_parameter
from neox_model.train.callbacks.tensors import estimate
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.settings import resolved_from

pytestmark = pytest.mark.slow

# The learning rate moves no weight, so that two batches of 4 have the mean gradient of one batch of 8.
SETTINGS: dict[str, Any] = {
    "seq_length": 12,
    "tokenizer_type": "CharLevelTokenizer",
    "make_vocab_size_divisible_by": 19,
    "train_iters": 4,
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": None,
    "log_interval": 2,
    "eval_iters": 0,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-30}},
    "log_grad_norm": True,
    "log_grad_pct_zeros": True,
    "log_zero_gradients": True,
    # Units of relu that are never positive have no gradient.
    "activation": "relu",
    "log_gradient_noise_scale": True,
    "gradient_noise_scale_n_batches": 2,
}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "data": {},
    "data, on the host": {"gradient_noise_scale_cpu_offload": True},
    "tensor": {"model_parallel_size": 2},
    "pipeline": {"engine": "deepspeed", "pipe_parallel_size": 2},
    "torch pipeline": {"pipe_parallel_size": 2, "pipeline_schedule": "zero_bubble"},
    "bf16": {"precision": "bfloat16"},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 64}},
}


def train(folder: str, data_path: str, runs: dict[str, dict[str, Any]]) -> None:
    """Train with each settings, one after another in the same processes; runs in every rank."""
    from neox_model.parallel.topology import create_groups
    from neox_model.train.open_run import train_in

    for name, changes in runs.items():
        settings = SETTINGS | {"data_path": data_path, "log_dir": str(Path(folder, name))} | changes
        resolved = resolved_from(settings, devices=int(os.environ["WORLD_SIZE"]))
        groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
        train_in(groups, resolved)


def metrics_of(folder: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        found.setdefault(record["iteration"], {}).update(record)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gradients")
    common = {"folder": str(folder), "data_path": write_corpus(folder)}
    large = {"train_batch_size": 8, "log_interval": 1, "log_gradient_noise_scale": False}
    run_ranks(train, size=1, runs={"one process": {}, "large": large}, **common)
    run_ranks(train, size=2, runs=TWO_RANKS, **common)
    return folder


def test_norms_of_tensors_add_up_to_the_norm_of_all_gradients(folder):
    metrics = metrics_of(folder / "one process")
    for iteration in (2, 4):
        norms = {key: value for key, value in metrics[iteration].items() if "gradient_norms/" in key}
        assert "gradient_norms/layers.2.mlp.down.weight" in norms
        total = math.sqrt(sum(norm**2 for norm in norms.values()))
        assert total == pytest.approx(metrics[iteration]["optimizer/grad_norm"], rel=1e-5)
    assert not any("gradient_norms/" in key for key in metrics[1])


def test_the_noise_scale_compares_batches_of_both_sizes(folder):
    small, large = metrics_of(folder / "one process"), metrics_of(folder / "large")
    squares = [small[iteration]["optimizer/grad_norm"] ** 2 for iteration in (1, 2)]
    noise, signal = estimate(
        small=4, small_square=sum(squares) / 2, large=8, large_square=large[1]["optimizer/grad_norm"] ** 2
    )
    assert small[2]["gradient_noise_scale/noise"] == pytest.approx(noise, rel=1e-3)
    assert small[2]["gradient_noise_scale/signal"] == pytest.approx(signal, rel=1e-3)
    assert noise > 0
    assert signal > 0
    ratio = noise / signal
    assert small[2]["gradient_noise_scale/simple"] == pytest.approx(ratio, rel=1e-3)
    assert "gradient_noise_scale/noise" not in small[1]


def zeros_of(folder, name):
    return [metrics_of(folder / name)[iteration]["optimizer/zero_gradients"] for iteration in (2, 4)]


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_have_the_share_of_zero_gradients_of_one_process(folder, name):
    wanted, found = zeros_of(folder, "one process"), zeros_of(folder, name)
    assert all(0.001 < share < 0.5 for share in wanted)
    # Two elements of 34,000 round to 0 on one layout alone; a row of padding would be 24.
    assert found == pytest.approx(wanted, abs=0.01 if name in ("bf16", "fp16") else 1e-4)
    assert "optimizer/zero_gradients" not in metrics_of(folder / name)[1]


def tensors_of(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if key.startswith("pct_grad_zeros/")}


def test_percentages_of_zeros_of_tensors_add_up_to_the_share_of_all(folder):
    metrics = metrics_of(folder / "one process")
    resolved = resolved_from(SETTINGS)
    rows = resolved.model.embedding.entries(build_tokenizer("CharLevelTokenizer").vocab_size)
    shapes = tensor_shapes(resolved.model, resolved.run, rows)
    sizes = {f"pct_grad_zeros/{name}": math.prod(shape) for name, shape in shapes.items()}
    for iteration in (2, 4):
        found = tensors_of(metrics[iteration])
        assert found.keys() == sizes.keys()
        zeros = sum(percentage / 100 * sizes[name] for name, percentage in found.items())
        share = metrics[iteration]["optimizer/zero_gradients"]
        assert zeros / sum(sizes.values()) == pytest.approx(share, rel=1e-6)
        assert max(found.values()) > 1
    assert tensors_of(metrics[1]) == {}


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_have_the_percentages_of_zeros_of_one_process(folder, name):
    wanted, found = (tensors_of(metrics_of(folder / each)[4]) for each in ("one process", name))
    assert found.keys() == wanted.keys()
    # A tensor of 24 elements has a percentage of 4 for each of them.
    assert found == pytest.approx(wanted, abs=5 if name in ("bf16", "fp16") else 0.5)


def test_the_share_of_zeros_leaves_out_padding():
    parameters = [logical_parameter((3, 2), init=torch.nn.init.zeros_) for _ in range(2)]
    # As on the last of two ranks: one row of the tensor, and one of padding.
    parameters[1].logical = replace(parameters[1].logical, slices=((1, 2), (0, 2)))
    gradients = [torch.tensor([[0.0, 1], [2, 0], [-0.0, math.nan]]), torch.tensor([[0.0, 1], [0, 0]])]
    assert share_of_zeros(parameters, gradients, SINGLE_PROCESS) == pytest.approx(4 / 8)
    names = {id(parameter): name for parameter, name in zip(parameters, "ab", strict=True)}
    # The other rank has the other two rows of the second one.
    parameters[1].logical = replace(parameters[1].logical, shape=(1, 2))
    shares = shares_of_zeros(names, parameters, gradients, SINGLE_PROCESS)
    assert {name: share.item() for name, share in shares.items()} == {"a": 0.5, "b": 0.5}


def share_over_replicas() -> float:
    """Return the share of zeros for gradients with two zeros on rank 0, and one on rank 1."""
    from neox_model.parallel.topology import create_groups

    groups = create_groups(1, 1)
    gradient = torch.tensor([[0.0, 1 + groups.data.rank], [groups.data.rank, 2], [3, 4]])
    parameter = logical_parameter((3, 2), init=torch.nn.init.zeros_)
    of_tensor = shares_of_zeros({id(parameter): "a"}, [parameter], [gradient], groups, are_averaged=False)
    share = share_of_zeros([parameter], [gradient], groups, are_averaged=False)
    assert torch.equal(of_tensor["a"], share)
    return share.item()


def test_the_share_of_zeros_of_gradients_that_are_not_averaged_is_that_of_all_replicas():
    assert run_ranks(share_over_replicas, size=2) == [pytest.approx(3 / 12)] * 2


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_have_the_metrics_of_one_process(folder, name):
    one, other = metrics_of(folder / "one process"), metrics_of(folder / name)
    relative = 0.1 if name in ("bf16", "fp16") else 1e-3
    for iteration in (2, 4):
        wanted, found = (
            {key: value for key, value in metrics[iteration].items() if key.startswith("gradient_")}
            for metrics in (one, other)
        )
        assert found.keys() == wanted.keys()
        limit = relative * wanted["gradient_noise_scale/signal"]
        assert found == pytest.approx(wanted, rel=relative, abs=limit)
