"""A run that ends within an evaluation resumes with it: every loss is that of an uninterrupted run."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neox_config.facts.checkpoints import complete_checkpoints
from neox_model.metrics.writers.jsonl import read_metrics
from support.corpus import write_corpus
from support.distributed import DistributedFailure, run_ranks
from support.settings import SMALL_TRAINING, resolved_from

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = SMALL_TRAINING | {
    "split": "80,10,10",
    "gradient_accumulation_steps": 2,
    "train_iters": 5,
    "eval_interval": 2,
    # Of two micro-batches each.
    "eval_iters": 4,
    "log_interval": 1,
    "save_interval": 100,
}
MICRO_BATCHES = 8
TORCH, DEEPSPEED = {"engine": "torch"}, {"engine": "deepspeed"}
PIPELINE = {"pipe_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "torch": TORCH,
    "torch, ZeRO 3": TORCH | {"zero_optimization": {"stage": 3}},
    "torch, pipeline": TORCH | PIPELINE,
    "deepspeed": DEEPSPEED,
    "deepspeed, pipeline": DEEPSPEED | PIPELINE,
}


def train(runs: list[dict[str, Any]]) -> list[int]:
    """Train each run, in turn; return the number of validation micro-batches that this rank read in each.

    Args:
        runs: `settings`, and optionally `number`, a signal that rank 0 receives with the micro-batch `at`.
    """
    from torch import distributed

    from neox_model.parallel.topology import create_groups
    from neox_model.train import open_run

    open_streams, counts = open_run.open_streams, []

    class Counted:
        def __init__(self, stream: Any, read: list[int], at: int, number: int | None) -> None:
            self._stream, self._read, self._at, self._number = stream, read, at, number
            self.close = stream.close

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            batch = next(self._stream)
            self._read.append(1)
            if self._number is not None and len(self._read) == self._at and distributed.get_rank() == 0:
                os.kill(os.getpid(), self._number)
            return batch

    for each in runs:
        read: list[int] = []

        def opening(*arguments: Any, each: Any = each, read: Any = read, **options: Any) -> Any:
            streams = open_streams(*arguments, **options)
            opened, at, number = streams["valid"], each.get("at", 0), each.get("number")
            return streams | {"valid": lambda first: Counted(opened(first), read, at, number)}

        resolved = resolved_from(SETTINGS | each["settings"], devices=int(os.environ["WORLD_SIZE"]))
        groups = create_groups(resolved.run.layout.tensor, resolved.run.layout.stages)
        open_run.open_streams = opening
        try:
            open_run.train_in(groups, resolved)
        finally:
            open_run.open_streams = open_streams
        distributed.barrier()
        counts.append(len(read))
    return counts


def places(folder: Path) -> dict[str, str]:
    return {"save": f"{folder}/saved", "load": f"{folder}/saved", "log_dir": f"{folder}/logs"}


def losses(folder: Path) -> list[tuple[int, str, float]]:
    """Return the losses in effect, in the order of the record."""
    return [
        (record["iteration"], name, value)
        for record in read_metrics(folder / "logs" / "metrics.jsonl")
        for name, value in record.items()
        if name.startswith("loss/")
    ]


def saved(folder: Path) -> list[str]:
    return [path.name for path in complete_checkpoints(folder / "saved")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stop_in_an_evaluation_saves_at_once_and_the_resumed_run_has_the_losses_of_an_uninterrupted_one(
    tmp_path, layout
):
    settings = LAYOUTS[layout] | {"data_path": write_corpus(tmp_path)}
    one, other = tmp_path / "uninterrupted", tmp_path / "stopped"
    stopped = {"settings": settings | places(other), "at": MICRO_BATCHES + 3, "number": int(signal.SIGTERM)}
    runs = [{"settings": settings | places(one)}, stopped, {"settings": settings | places(other)}]
    found = run_ranks(train, size=2, runs=runs)
    # After 2, 4 and at the end. The second one ends soon after its third micro-batch, and is repeated.
    assert [counts[0] for counts in found] == [3 * MICRO_BATCHES] * 2
    ended = [counts[1] - MICRO_BATCHES for counts in found]
    assert ended[0] == ended[1]
    assert 3 <= ended[0] <= 6
    assert [counts[2] for counts in found] == [2 * MICRO_BATCHES] * 2
    assert saved(other) == ["global_step4", "global_step5"]
    assert losses(other) == losses(one)
    assert [loss[:2] for loss in losses(one) if loss[1] != "loss/train"] == [
        (2, "loss/validation"),
        (4, "loss/validation"),
        (5, "loss/validation"),
        (5, "loss/test"),
    ]


@pytest.mark.parametrize(
    ("layout", "size"), [("torch", 1), ("torch, pipeline", 2), ("deepspeed, pipeline", 2)]
)
def test_a_run_killed_in_the_evaluation_after_a_save_resumes_with_this_evaluation(tmp_path, layout, size):
    settings = LAYOUTS[layout] | {"data_path": write_corpus(tmp_path), "save_interval": 4}
    one, other = tmp_path / "uninterrupted", tmp_path / "killed"
    run_ranks(train, size=size, runs=[{"settings": settings | places(one)}])
    killed = {"settings": settings | places(other), "at": MICRO_BATCHES + 3, "number": int(signal.SIGKILL)}
    # The other rank may be the first to fail, because the connection is closed.
    with pytest.raises(DistributedFailure, match=r"code -9|onnection"):
        run_ranks(train, size=size, runs=[killed])
    assert saved(other) == ["global_step4"]
    assert losses(other)[-1][:2] == (4, "loss/train")
    found = run_ranks(train, size=size, runs=[{"settings": settings | places(other)}])
    assert found == [[2 * MICRO_BATCHES]] * size
    assert losses(other) == losses(one)
