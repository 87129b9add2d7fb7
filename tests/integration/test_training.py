"""A resumed run is the uninterrupted one, in a new process and in parts; what a run imports and opens."""

import inspect
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.corpus import write_corpus
from support.distributed import run_ranks
from support.gloo import threads_of_gloo_groups
from support.settings import TINY, resolved_from

# CharLevelTokenizer has 512 entries: padded to 513 they need one more row on two tensor-parallel ranks.
SETTINGS: dict[str, Any] = {
    "num_layers": 2,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "pos_emb": "rotary",
    "make_vocab_size_divisible_by": 19,
    "tokenizer_type": "CharLevelTokenizer",
    "split": "80,10,10",
    "train_iters": 20,
    "optimizer": {"type": "Adam", "params": {"lr": 0.003}},
    "lr_decay_style": "cosine",
    "gradient_clipping": 0.5,
    "weight_decay": 0.1,
    "init_method_std": 0.02,
    "log_interval": 1,
    "eval_interval": 8,
    "eval_iters": 2,
}

MEASURED = ("loss/train", "loss/validation", "loss/test", "optimizer/learning_rate", "optimizer/grad_norm")


def read_record(folder: Path) -> dict[str, dict[int, float]]:
    """Metric -> iteration -> value."""
    record: dict[str, dict[int, float]] = {name: {} for name in MEASURED}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        for name in values.keys() & record.keys():
            record[name][values["iteration"]] = values[name]
    return record


# Resuming, with dropout and in bfloat16

RESUMED = SETTINGS | {
    "train_iters": 40,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "precision": "bfloat16",
    "zero_optimization": {"stage": 1},
    "save_interval": 100,
}


def check_same_record(resumed: Path, whole: Path, *, iterations: int = 40) -> None:
    expected = read_record(whole)
    assert read_record(resumed) == expected
    assert list(expected["loss/train"]) == list(range(1, iterations + 1))
    assert list(expected["loss/validation"]) == list(range(8, iterations + 1, 8))


def launch(program: str, config: Path, *overrides: str, python_path: Path | None = None) -> str:
    """Run a program as one process; its standard output."""
    command = [sys.executable, "-m", program, "--config", str(config)]
    command += [f"--set={setting}" for setting in overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if python_path is not None:
        environment["PYTHONPATH"] = str(python_path)
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_training_resumed_by_a_new_process_equals_the_uninterrupted_one(tmp_path):
    config = tmp_path / "config.yml"
    config.write_text(json.dumps(TINY | RESUMED | {"data_path": write_corpus(tmp_path)}))

    def settings(name: str) -> list[str]:
        folder = tmp_path / name
        return [f"save={folder}", f"load={folder}", f"log-dir={folder}"]

    whole = launch("neox_model.train", config, *settings("whole"))
    first = launch("neox_model.train", config, *settings("parts"), "exit-interval=20")
    second = launch("neox_model.train", config, *settings("parts"))
    check_same_record(tmp_path / "parts", tmp_path / "whole")
    assert whole.startswith("validation loss ")
    assert (first, second) == ("", whole)
    evaluated = launch("neox_model.evaluate", config, *settings("parts")).splitlines()
    assert evaluated == whole.splitlines()
    assert evaluated[1].startswith("test loss ")
    assert all(line.endswith(f", after iteration {RESUMED['train_iters']}") for line in evaluated)


# Python imports it when it starts.
WITHOUT_COMPILER = """import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        assert name != "torch._dynamo", "the start of a run is a second longer"

sys.meta_path.insert(0, Refused())
"""


@pytest.mark.slow
def test_a_training_that_compiles_nothing_does_not_import_the_compiler(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_COMPILER)
    config = tmp_path / "config.yml"
    config.write_text(json.dumps(TINY | RESUMED | {"data_path": write_corpus(tmp_path), "train_iters": 2}))
    folders = [f"save={tmp_path}", f"load={tmp_path}", f"log-dir={tmp_path}"]
    launch("neox_model.train", config, *folders, "exit-interval=1", python_path=tmp_path)
    launch("neox_model.train", config, *folders, python_path=tmp_path)
    assert list(read_record(tmp_path)["loss/train"]) == [1, 2]


HOST = {"device": "cpu"}
SHARED: dict[str, dict[str, Any]] = {
    "ZeRO 1": {"stage": 1},
    "ZeRO 1, states on the host": {"stage": 1, "offload_optimizer": HOST},
    "ZeRO 2, states on the host": {"stage": 2, "offload_optimizer": HOST},
    "ZeRO 3, all on the host": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
}


def train_whole_and_in_parts(folder: str) -> None:
    """Train 16 iterations at once, and 10 and 6 more, with each kind of ZeRO; runs in every rank."""
    from neox_model.parallel.topology import create_groups
    from neox_model.train.open_run import train_in

    for zero, block in SHARED.items():
        for name, exit_interval in {"whole": None, "first": 10, "second": None}.items():
            target = str(Path(folder, zero, "whole" if name == "whole" else "parts"))
            settings = {"save": target, "load": target, "log_dir": target, "exit_interval": exit_interval}
            settings |= {"data_path": str(Path(folder, "corpus")), "train_iters": 16}
            settings |= {"zero_optimization": block}
            resolved = resolved_from(RESUMED | settings, devices=int(os.environ["WORLD_SIZE"]))
            train_in(create_groups(1, 1), resolved)


@pytest.mark.slow
def test_a_resumed_training_of_two_processes_is_the_uninterrupted_one(tmp_path):
    write_corpus(tmp_path)
    run_ranks(train_whole_and_in_parts, size=2, folder=str(tmp_path), timeout_seconds=300)
    for zero in SHARED:
        check_same_record(tmp_path / zero / "parts", tmp_path / zero / "whole", iterations=16)


# Open files and threads

WITH_ALL_GROUPS = {
    "model_parallel_size": 2,
    "pipe_parallel_size": 2,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "save_interval": 2,
    "train_iters": 40,
}


def train_with_few_files(limit: int, folder: str, **settings: Any) -> None:
    """Train where a rank may not open more files than the limit."""
    from neox_model.parallel.topology import create_groups
    from neox_model.train.open_run import train_in

    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    resolved = resolved_from(SETTINGS | settings, devices=int(os.environ["WORLD_SIZE"]))
    groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
    train_in(groups, resolved)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_a_rank_that_saves_and_evaluates_often_opens_few_files(tmp_path, engine):
    settings = WITH_ALL_GROUPS | {"data_path": write_corpus(tmp_path), "save": str(tmp_path / "saved")}
    settings |= {"engine": engine, "zero_optimization": {"stage": 1}, "log_dir": str(tmp_path)}
    run_ranks(train_with_few_files, size=8, limit=100, folder=str(tmp_path), **settings)


def train_and_count_threads(is_limited: bool, folder: str, **settings: Any) -> tuple[int, int]:
    """Train; return the number of gloo groups and of their worker threads, which torch does not limit."""
    from torch import distributed

    from neox_model.parallel import topology
    from neox_model.train.open_run import train_in

    if not is_limited:
        topology.limit_gloo_threads = lambda: None
        distributed.ProcessGroupGloo.__init__ = inspect.unwrap(distributed.ProcessGroupGloo.__init__)
    resolved = resolved_from(SETTINGS | settings, devices=int(os.environ["WORLD_SIZE"]))
    groups = topology.create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
    train_in(groups, resolved)
    return threads_of_gloo_groups()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_every_group_of_a_training_has_one_worker_thread(tmp_path, engine):
    settings = WITH_ALL_GROUPS | {"train_iters": 2, "engine": engine, "zero_optimization": {"stage": 1}}
    settings |= {"data_path": write_corpus(tmp_path)}
    for is_limited in (True, False):
        for groups, threads in run_ranks(
            train_and_count_threads, size=4, is_limited=is_limited, folder=str(tmp_path), **settings
        ):
            assert groups > 3
            # All but the group that was formed before are planted ones.
            assert threads == (groups if is_limited else 2 * groups - 1)
