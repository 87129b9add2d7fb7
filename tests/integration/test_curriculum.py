"""Curricula in real trainings: any layout reads the same, cut to the same lengths; so does a resumed one."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from neox_data.curriculum.analyze import METRICS
from neox_data.curriculum.metric_index import write_metric_index
from neox_data.curriculum.sample_order import fingerprint_order
from neox_data.errors import DataError
from neox_model.train.data.datasets import build_datasets
from neox_model.train.data.description import training_data_of
from neox_model.train.data.position import START, Position
from neox_model.train.state import StepReport, TrainState
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.refusals import refused
from support.settings import resolved_from

SETTINGS: dict[str, Any] = {
    "num_layers": 2,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "pos_emb": "rotary",
    "tokenizer_type": "CharLevelTokenizer",
    "split": "80,20,0",
    "train_iters": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 0.003}},
    "log_interval": 1,
    "eval_interval": 4,
    "eval_iters": 1,
    # After t of 9 iterations 4 + t / 9 * 12 tokens, down to a multiple of 4.
    "curriculum_learning": {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 4,
        "max_difficulty": 16,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 9, "difficulty_step": 4},
    },
}
LENGTHS = [4, 4, 8, 8, 8, 12, 12, 12]
pytestmark = pytest.mark.slow

ONE = {"train_micro_batch_size_per_gpu": 4}
RUNS: dict[str, dict[str, Any]] = {
    "one": ONE,
    "first half": ONE | {"exit_interval": 4, "save": "halves", "save_interval": 100},
    "second half": ONE | {"load": "halves"},
    "data parallel": {},
    "pipeline": ONE | {"pipe_parallel_size": 2},
    "torch": ONE | {"pipe_parallel_size": 2, "engine": "torch"},
}


def sampling(folder: Path) -> dict[str, Any]:
    metric = {
        "index_to_sample_path": str(folder / "vocabularyrarity_index_to_sample"),
        "index_to_metric_path": str(folder / "vocabularyrarity_index_to_metric"),
        "difficulty_type": "percentile",
        "clustering_type": "schedule_based",
        "min_difficulty": 1,
        "max_difficulty": 10,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [1, 5, 10], "max_step": [2, 6]},
    }
    curriculum = {
        "enabled": True,
        "data_cluster_path": str(folder / "clusters"),
        "curriculum_metrics": {"vocabularyrarity": metric},
    }
    return {
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {"enabled": True, "num_workers": 1, "curriculum_learning": curriculum},
        }
    }


def train_runs(folder: str, settings: dict[str, Any], names: list[str]) -> None:
    """Train each run, one after another in the same processes; runs in every rank."""
    from neox_model.parallel.topology import create_groups
    from neox_model.train.open_run import train_in

    for name in names:
        paths = {key: str(Path(folder, "halves")) for key in RUNS[name] if key in ("save", "load")}
        resolved = resolved_from(
            settings | RUNS[name] | paths | {"log_dir": str(Path(folder, name.split()[-1]))},
            devices=int(os.environ["WORLD_SIZE"]),
        )
        groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
        train_in(groups, resolved)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("curriculum")
    settings = SETTINGS | {"data_path": write_corpus(folder)}
    analyze(settings | ONE, folder)
    return folder, settings | sampling(folder)


def analyze(settings: dict[str, Any], folder: Path) -> None:
    dataset = training_data_of(resolved_from(settings)).datasets["train"]
    values = METRICS["vocabularyrarity"](dataset, len(dataset))
    write_metric_index(folder, "vocabularyrarity", values, fingerprint_order(dataset))


@pytest.fixture(scope="module")
def records(prepared) -> dict[str, dict[str, dict[int, float]]]:
    folder, settings = prepared
    common = {"folder": str(folder), "settings": settings}
    run_ranks(train_runs, size=1, names=["one", "first half", "second half"], **common)
    run_ranks(train_runs, size=2, names=["data parallel", "pipeline", "torch"], timeout_seconds=300, **common)
    return {name: read_record(folder / name) for name in ("one", "half", "parallel", "pipeline", "torch")}


def read_record(folder: Path) -> dict[str, dict[int, float]]:
    """Metric -> iteration -> value."""
    record: dict[str, dict[int, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        for name in values.keys() & {"loss/train", "loss/validation"}:
            record.setdefault(name, {})[values["iteration"]] = values[name]
    return record


def test_samples_are_easy_first_and_cut_to_the_length_of_their_iteration(prepared) -> None:
    data = training_data_of(resolved_from(prepared[1] | ONE))
    assert [data.length_at(iteration) - 1 for iteration in range(8)] == LENGTHS
    drawn = data.datasets["train"]
    samples = len(drawn.datasets[0])
    values = METRICS["vocabularyrarity"](drawn.datasets[0], samples)
    rank = np.argsort(np.argsort(values, kind="stable"))
    for iteration, share in enumerate([1, 1, 5, 5, 5, 5]):
        for item in range(iteration * 8, iteration * 8 + 8):
            assert rank[drawn.locate(item)[1]] < samples // 10 * share


@pytest.mark.parametrize("name", ["parallel", "pipeline", "torch"])
def test_every_layout_has_the_losses_of_one_process(records, name: str) -> None:
    for metric in ("loss/train", "loss/validation"):
        assert records[name][metric] == pytest.approx(records["one"][metric], abs=1e-5), metric
    assert list(records[name]["loss/train"]) == list(range(1, 9))


def test_a_resumed_training_is_the_uninterrupted_one(records) -> None:
    assert records["half"]["loss/train"] == records["one"]["loss/train"]


@pytest.mark.parametrize("change", [{"seed": 4321}, {"sample_order": "lazy"}])
def test_an_analysis_of_another_order_is_refused(prepared, change: dict[str, Any]):
    resolved = resolved_from(prepared[1] | ONE | change)
    with refused(DataError, "sample_order", "neox-data"):
        build_datasets(resolved, ("train",))


def test_an_analysis_of_other_data_of_the_same_size_is_refused(prepared, tmp_path: Path):
    prefix = tmp_path / "other"
    for ending in ("bin", "idx"):
        data = Path(f"{prepared[1]['data_path']}.{ending}").read_bytes()
        # The characters of the documents in reverse order.
        Path(f"{prefix}.{ending}").write_bytes(data[::-1] if ending == "bin" else data)
    resolved = resolved_from(prepared[1] | ONE | {"data_path": str(prefix)})
    with refused(DataError, "another seed, sample_order"):
        build_datasets(resolved, ("train",))


def test_a_curriculum_that_chooses_samples_resumes_with_any_batch_size(prepared, tmp_path: Path):
    """Batches of 4, 6, 5 and 8: what was read stays what it was."""
    # Only this order of the underlying samples does not depend on the number requested.
    settings = prepared[1] | {"sample_order": "lazy"}
    analyze(settings | ONE | {"data_efficiency": {}}, tmp_path)
    settings |= sampling(tmp_path)
    position, read = START, []
    for iteration, batch in ((3, 4), (4, 6), (5, 5), (8, 8)):
        size = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": batch}
        resolved = resolved_from(settings | size)
        drawn = build_datasets(resolved, ("train",), position=position)["train"]
        state = TrainState(last_iteration=iteration, samples_per_iteration=batch)
        if position != START:
            state.load_state_dict({**asdict(position), "skipped_iterations": 0, "tokens": 0})
        while not state.finished:
            state.advance(StepReport(loss=torch.tensor(0.0), grad_norm=None, skipped=False, tokens=0))
        assert [drawn[item].tolist() for item in range(len(read))] == read
        read += [drawn[item].tolist() for item in range(len(read), state.samples)]
        position = state.position
    assert (position.iteration, len(read), len(drawn)) == (8, 47, 47)


def test_curriculum_with_unknown_batch_sizes_is_refused(prepared):
    resolved = resolved_from(prepared[1] | ONE)
    unknown = Position(iteration=2, samples=12, batch_sizes=((0, 8),))
    with refused(DataError, "12 samples", "2 iterations"):
        build_datasets(resolved, ("train",), position=unknown)
