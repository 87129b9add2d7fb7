"""Memory snapshots of the right iterations, and after running out of memory.

Without a GPU, the functions that record and dump are replaced; `make gpu-check` uses PyTorch's.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from neox_model.train.callbacks import profilers
from neox_model.train.callbacks.profilers import MemoryCallback
from neox_model.train.state import StepReport, TrainState
from support.refusals import shows
from support.runs import a_run, count


class Recorder:
    """What the callback did, in order; `events` may raise an error when memory is dumped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.error: Exception | None = None
        self.observer: Any = None
        monkeypatch.setattr(profilers, "record_memory_history", lambda events: self.done.append("record"))
        monkeypatch.setattr(profilers, "stop_memory_history", lambda: self.done.append("stop"))
        monkeypatch.setattr(profilers, "dump_memory_snapshot", self.dump)
        monkeypatch.setattr(profilers, "on_out_of_memory", lambda call: setattr(self, "observer", call))

    def dump(self, path: Path) -> None:
        self.done.append("dump")
        if self.error is not None:
            raise self.error
        path.write_text("snapshot")

    def step(self, batches: Any) -> StepReport:
        self.done.append("step")
        return StepReport(loss=torch.ones(()), grad_norm=None, skipped=False, tokens=1)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def trained(recorder: Recorder, folder: Path, *, first: int = 0, last: int = 2, end: int = 4) -> TrainState:
    callback = MemoryCallback(last, folder, rank=3)
    callback.start()
    return count(callback, last=end, iteration=first, step=recorder.step)


def test_a_snapshot_is_written_after_the_last_recorded_iteration(recorder, tmp_path):
    trained(recorder, tmp_path / "memory")
    assert recorder.done == ["record", "step", "step", "dump", "stop", "step", "step"]
    assert [path.name for path in (tmp_path / "memory").iterdir()] == [
        "rank-00003.iterations-1-2.memory.pickle"
    ]


def test_a_training_that_ends_earlier_writes_what_it_recorded(recorder, tmp_path):
    trained(recorder, tmp_path, first=1, last=9, end=3)
    assert recorder.done == ["record", "step", "step", "dump", "stop"]
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00003.iterations-2-3.memory.pickle"]


def test_a_training_that_resumes_later_records_only_its_start(recorder, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    trained(recorder, tmp_path / "memory", first=2, last=2)
    assert recorder.done == ["record", "stop", "step", "step"]
    assert shows(caplog.text, "no allocations", "iteration 2")
    assert not (tmp_path / "memory").exists()


def test_running_out_of_memory_writes_a_snapshot(recorder, tmp_path):
    trained(recorder, tmp_path, first=2, last=2)
    recorder.observer()
    recorder.observer()
    assert recorder.done.count("dump") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00003.out-of-memory.pickle"]


def test_no_error_reaches_the_allocator(recorder, tmp_path, caplog):
    trained(recorder, tmp_path, first=2, last=2)
    recorder.error = RuntimeError("the history is broken")
    recorder.observer()
    assert shows(caplog.text, "was not written")


def test_a_snapshot_that_cannot_be_written_does_not_end_the_training(recorder, tmp_path, caplog):
    recorder.error = OSError("no space left on device")
    assert trained(recorder, tmp_path).iteration == 4
    assert shows(caplog.text, "not written", "no space left")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_pytorch_writes_a_snapshot_with_the_allocations(tmp_path):
    callback = MemoryCallback(1, tmp_path, rank=0)
    run = a_run(callback)
    callback.start()
    callback.on_start()
    kept = torch.ones(1000, device="cuda")
    run.state.iteration = 1
    callback.on_step(StepReport(loss=kept.sum(), grad_norm=None, skipped=False, tokens=1))
    (path,) = tmp_path.iterdir()
    assert b"test_memory" in path.read_bytes()
