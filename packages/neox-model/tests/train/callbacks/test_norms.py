"""Norms of whole tensors: the same for every layout, and those of the tensors themselves."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from support.corpus import write_corpus
from support.distributed import run_ranks
from support.settings import resolved_from

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {
    "seq_length": 12,
    "tokenizer_type": "CharLevelTokenizer",
    "make_vocab_size_divisible_by": 19,
    "train_iters": 2,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "log_interval": 1,
    "eval_iters": 0,
    # A key's bias has no gradient but rounding, of which a small eps would make whole steps.
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "eps": 1e-3}},
    "log_param_norm": True,
    "log_optimizer_states": True,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"train_micro_batch_size_per_gpu": 2},
    "ZeRO 1": {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}},
    "ZeRO 3": {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}},
    "tensor": {"model_parallel_size": 2},
    "pipeline": {"pipe_parallel_size": 2},
    "torch pipeline": {"pipe_parallel_size": 2, "engine": "torch"},
}


def train(folder: str, data_path: str, names: list[str]) -> None:
    """Train each layout, one after another in the same processes; runs in every rank."""
    from neox_model.parallel.topology import create_groups
    from neox_model.train.open_run import train_in

    for name in names:
        settings = SETTINGS | LAYOUTS.get(name, {}) | {"data_path": data_path}
        settings |= {
            "log_dir": str(Path(folder, name)),
            "save": str(Path(folder, name, "ck")),
            "save_interval": 2,
        }
        resolved = resolved_from(settings, devices=int(os.environ["WORLD_SIZE"]))
        groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
        train_in(groups, resolved)


def norms_of(folder: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        norms = {name: value for name, value in record.items() if "_norms/" in name}
        if norms:
            found[record["iteration"]] = norms
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("norms")
    common = {"folder": str(folder), "data_path": write_corpus(folder)}
    run_ranks(train, size=1, names=["one process"], **common)
    run_ranks(train, size=2, names=list(LAYOUTS), timeout_seconds=300, **common)
    return folder


def test_norms_equal_those_of_the_tensors_in_the_checkpoint(folder):
    from safetensors.torch import load_file

    norms = norms_of(folder / "one process")
    assert list(norms) == [1, 2]
    (shard,) = (folder / "one process/ck/global_step2").glob("*.safetensors")
    stored = load_file(shard)
    weight = "embedding.word_embeddings.weight"
    assert f"optimizer_state_norms/{weight}/exp_avg_sq" in norms[2]
    for name, norm in norms[2].items():
        logical = name.split("/", 1)[1]
        pieces = [value for key, value in stored.items() if key.partition("@")[0] == logical]
        whole = sum(piece.float().square().sum().item() for piece in pieces) ** 0.5
        assert norm == pytest.approx(whole, rel=1e-5), name
    assert sum(name.startswith("param_norms/") for name in norms[2]) * 3 == len(norms[2])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_norms_of_one_process(folder, layout):
    one, other = norms_of(folder / "one process"), norms_of(folder / layout)
    assert other.keys() == one.keys()
    for iteration, norms in one.items():
        assert other[iteration] == pytest.approx(norms, rel=1e-4, abs=1e-6)
