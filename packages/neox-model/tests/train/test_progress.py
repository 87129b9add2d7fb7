"""A worker reports its progress, and the collective that it waits for, to its agent."""

import json
import time

from neox_launcher.worker.reporting import ALL_DONE, Progress
from neox_model.metrics.timers import Timers
from neox_model.parallel.flight_recorder import newest_per_group
from neox_model.train.hooks.checkpoint import CheckpointHook
from neox_model.train.hooks.progress import ProgressHook
from neox_model.train.state import TrainState
from support.distributed import run_ranks


def test_progress_is_the_iteration_and_ends_with_the_training(tmp_path, monkeypatch):
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    hook = ProgressHook(Progress(3))
    state = TrainState(last_iteration=9, samples_per_iteration=8)
    state.iteration = 7
    hook.on_step(state, None)
    assert int((tmp_path / "rank-3.progress").read_text()) == 7
    hook.on_end(state)
    assert int((tmp_path / "rank-3.progress").read_text()) == ALL_DONE


def test_progress_is_reported_during_a_save(tmp_path, monkeypatch):
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    monkeypatch.setattr("neox_launcher.worker.reporting._BEAT_SECONDS", 0.001)
    progress, told, saved = Progress(0), tmp_path / "rank-0.progress", []

    def save(state):
        saved.append(told.stat().st_mtime_ns)
        deadline = time.monotonic() + 300
        while told.stat().st_mtime_ns == saved[0]:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert int(told.read_text()) == state.iteration

    hook = CheckpointHook(
        save, interval=2, timers=Timers(), before_save=lambda: None, while_saving=progress.repeated
    )
    state = TrainState(last_iteration=9, samples_per_iteration=8)
    state.iteration = 4
    hook.on_step(state, None)
    assert len(saved) == 1


def test_nothing_is_reported_without_an_agent(monkeypatch):
    monkeypatch.delenv("NEOX_RUN_DIR", raising=False)
    ProgressHook(Progress(0)).on_end(TrainState(last_iteration=1, samples_per_iteration=8))


def test_the_newest_collective_of_each_group_counts():
    def entry(group, number, name, is_p2p=False):
        return {
            "process_group": group,
            "collective_seq_id": number,
            "profiling_name": name,
            "is_p2p": is_p2p,
        }

    world, pair = ["0", "default_pg"], ["1", "pair"]
    entries = [entry(world, 2, "b"), entry(world, 1, "a"), entry(pair, 9, "c"), entry(pair, 99, "send", True)]
    assert newest_per_group(entries) == {"0:default_pg": (2, "b"), "1:pair": (9, "c")}


def count_collectives() -> str:
    import torch
    from torch import distributed

    from neox_model.parallel.flight_recorder import last_collectives

    for _ in range(5):
        distributed.all_reduce(torch.ones(1))
    return last_collectives()


def test_the_flight_recorder_of_a_real_process_is_read():
    [answer] = run_ranks(count_collectives, size=1, environment={"TORCH_FR_BUFFER_SIZE": "100"})
    assert json.loads(answer)["0:default_pg"] == [5, "gloo:all_reduce"]
