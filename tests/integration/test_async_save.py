"""Asynchronous saves write what synchronous ones write, on every layout and in every precision."""

import json
import math
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from neox_config.facts.checkpoints import LATEST, MANIFEST, checkpoint_name, complete_checkpoints
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.settings import SMALL_TRAINING, resolved_from

pytestmark = pytest.mark.slow

ACCUMULATES = {"gradient_accumulation_steps": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"model_parallel_size": 2, "precision": "bfloat16"},
    "pipeline": {"pipe_parallel_size": 2, "precision": "fp16", **ACCUMULATES},
    "zero1": {"zero_optimization": {"stage": 1}, "precision": "bfloat16"},
    "zero2": {"zero_optimization": {"stage": 2}, "precision": "fp16"},
    "zero3": {"zero_optimization": {"stage": 3}, "precision": "bfloat16"},
    **{
        f"zero{stage} of DeepSpeed": {
            "engine": "deepspeed",
            "zero_optimization": {"stage": stage},
            "precision": precision,
        }
        for stage, precision in ((1, "bfloat16"), (2, "fp16"), (3, "bfloat16"))
    },
    "tensor and zero1": {
        "model_parallel_size": 2,
        "zero_optimization": {"stage": 1},
        "precision": "fp16",
    },
    "torch pipeline": {
        "pipe_parallel_size": 2,
        "engine": "torch",
        "precision": "fp16",
        **ACCUMULATES,
    },
    "zero-bubble pipeline in bfloat16": {
        "pipe_parallel_size": 2,
        "pipeline_schedule": "zero_bubble",
        "precision": "bfloat16",
        **ACCUMULATES,
    },
    "ZBV pipeline": {"num_layers": 4, "pipe_parallel_size": 2, "pipeline_schedule": "zbv", **ACCUMULATES},
    "interleaved pipeline in bfloat16": {
        "num_layers": 4,
        "pipe_parallel_size": 2,
        "pipeline_schedule": "interleaved",
        "precision": "bfloat16",
        **ACCUMULATES,
    },
    "pipeline in bfloat16": {
        "engine": "deepspeed",
        "pipe_parallel_size": 2,
        "precision": "bfloat16",
        **ACCUMULATES,
    },
}
FAST = ("zero1",)
ITERATIONS, MIDDLE = 6, 2


def train_each(folder: str, corpus: str, layout: dict[str, Any]) -> None:
    """Train with synchronous and with asynchronous saves, and resume from one of the latter."""
    from torch import distributed

    from neox_model.parallel.topology import create_groups
    from neox_model.train import open_run

    base = SMALL_TRAINING | layout | {"data_path": corpus, "train_iters": ITERATIONS, "save_interval": 2}
    trainings = {
        "synchronous": {},
        "asynchronous": {"async_save": True},
        "resumed": {"async_save": True, "load": f"{folder}/asynchronous"},
    }
    for name, others in trainings.items():
        if "load" in others:
            (Path(folder) / "asynchronous" / LATEST).write_text(checkpoint_name(MIDDLE))
            distributed.barrier()
        resolved = resolved_from(base | others | {"save": f"{folder}/{name}"}, devices=2)
        groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
        open_run.train_in(groups, resolved)
        distributed.barrier()


def shards_of(folder: Path) -> dict[str, dict[str, bytes]]:
    """Return the bytes of the shards of all checkpoints in a folder."""
    return {
        each.name: {path.name: path.read_bytes() for path in each.iterdir() if path.name != MANIFEST}
        for each in complete_checkpoints(folder)
    }


def manifest_of(folder: Path, iteration: int) -> dict[str, Any]:
    """Return a manifest without the parameters, which name the folder."""
    contents = json.loads((folder / checkpoint_name(iteration) / MANIFEST).read_text())["contents"]
    return {name: value for name, value in contents.items() if name != "config"}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[] if name in FAST else pytest.mark.sweep, id=name) for name in LAYOUTS],
)
def test_the_files_are_equal_and_resume_bit_for_bit(tmp_path, layout):
    corpus = write_corpus(tmp_path)
    run_ranks(train_each, size=2, folder=str(tmp_path), corpus=corpus, layout=LAYOUTS[layout])
    expected = shards_of(tmp_path / "synchronous")
    assert list(expected) == ["global_step2", "global_step4", "global_step6"]
    assert shards_of(tmp_path / "asynchronous") == expected
    del expected["global_step2"]
    assert shards_of(tmp_path / "resumed") == expected
    for iteration in (4, 6):
        manifests = [
            manifest_of(tmp_path / name, iteration) for name in ("synchronous", "asynchronous", "resumed")
        ]
        assert manifests[1:] == manifests[:1] * 2
    assert not list(tmp_path.glob("*/.*.saving"))


ENDS: dict[str, dict[str, Any]] = {
    "not finite": {"nonfinite_patience": 1},
    "spike": {"on_spike": "rollback", "spike_window": 5, "spike_threshold": 20.0},
    "copies": {"sdc_check_interval": 8, "precision": "fp32"},
    "refused": {"train_iters": 8},
}
SAVED, BROKEN = 7, 8
ENDING = SMALL_TRAINING | {
    "async_save": True,
    "save_interval": SAVED,
    "train_iters": 12,
    "gradient_accumulation_steps": 1,
    "precision": "bfloat16",
    "hidden_dropout": 0.0,
}
SLOW_SECONDS = 1.0


def end_while_a_save_is_under_way(folder: str, corpus: str) -> dict[str, str]:
    """Let trainings end with an error while writers are slow; return the messages."""
    from neox_config.errors import NeoXError
    from neox_model.checkpoint import writer_process
    from neox_model.layers.lm_head import LMLoss
    from neox_model.parallel.topology import create_groups
    from neox_model.train import open_run

    begin, of_hidden, ended = writer_process._start, LMLoss.of_hidden, {}

    def start_slowly(*arguments: Any) -> "subprocess.Popen[bytes]":
        process = begin(*arguments)
        process.send_signal(signal.SIGSTOP)
        threading.Timer(SLOW_SECONDS, process.send_signal, [signal.SIGCONT]).start()
        return process

    writer_process._start = start_slowly
    for name, settings in ENDS.items():
        calls: list[int] = []

        def broken(
            self: LMLoss, hidden: Any, weight: Any, targets: Any, name: str = name, calls: list[int] = calls
        ) -> Any:
            calls.append(1)
            loss = of_hidden(self, hidden, weight, targets)
            if len(calls) != BROKEN:
                return loss
            if name == "copies" and torch.distributed.get_rank() == 1:
                weight.data[0, 0] += 1
            return loss * {"spike": 100.0, "copies": 1.0}.get(name, math.nan)

        LMLoss.of_hidden = broken
        files = {"data_path": corpus, "save": f"{folder}/{name}"}
        resolved = resolved_from(ENDING | settings | files, devices=2)
        groups = create_groups(1, 1)
        try:
            open_run.train_in(groups, resolved)
            ended[name] = ""
        except NeoXError as error:
            ended[name] = str(error)
        LMLoss.of_hidden = of_hidden
    return ended


def test_a_training_that_ends_with_an_error_first_completes_the_save_under_way(tmp_path):
    arguments = {"folder": str(tmp_path), "corpus": write_corpus(tmp_path)}
    first, second = run_ranks(end_while_a_save_is_under_way, size=2, **arguments)
    assert first == second
    assert "1 update in" in first["not finite"]
    assert "of iteration 8" in first["spike"]
    assert "copies" in first["copies"]
    assert "last iteration, 8" in first["refused"]
    for name in ENDS:
        assert (tmp_path / name / LATEST).read_text().strip() == checkpoint_name(SAVED), name
        assert [path.name for path in complete_checkpoints(tmp_path / name)] == [checkpoint_name(SAVED)]
        assert not list((tmp_path / name).glob(".*.saving"))
