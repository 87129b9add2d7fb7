"""Exact bytes of collective operations, ours and the engine's, and their time and bandwidth."""

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from neox_model.metrics.collective_times import CollectiveTimes, Total
from neox_model.parallel.groups import Group
from neox_model.torch_compat import watched_collectives
from neox_model.train.callbacks.profilers import CollectivesCallback
from support import layouts
from support.distributed import run_ranks
from support.layouts import SETTINGS, SMALL
from support.runs import a_run
from support.settings import resolved_from
from support.worlds import forget_deepspeeds_world

RUNS: dict[str, dict[str, Any]] = {
    "data": {},
    "data fp16": {"precision": "fp16"},
    "tensor": {"model_parallel_size": 2},
    "tensor fp16": {"model_parallel_size": 2, "precision": "fp16"},
    "pipeline": {"engine": "deepspeed", "pipe_parallel_size": 2},
    "ZeRO 1": {"engine": "deepspeed", "zero_optimization": {"stage": 1}},
}


def count_updates() -> dict[str, dict[str, Any]]:
    """Return the operations of the first update of each run; runs in every rank."""
    found = {}
    for name, settings in RUNS.items():
        forget_deepspeeds_world()
        resolved = resolved_from(SETTINGS | SMALL | settings, devices=dist.get_world_size())
        started = layouts.start(resolved)
        batches = layouts.batches_of(resolved, started.groups)
        times = CollectiveTimes({"both": started.groups.world}, names_callers=True)
        with watched_collectives(times.watch):
            started.step(batches)
        started.step(batches)
        assert all(total.seconds > 0 for total in times.totals.values())
        model = resolved.config.model
        found[name] = {
            "calls": {f"{what} over {group}": total.count for (what, group), total in times.totals.items()},
            "bytes": {f"{what} over {group}": total.bytes for (what, group), total in times.totals.items()},
            "parameters": sum(each.numel() for each in started.engine.model.parameters()),
            "hidden": resolved.run.batch.micro * model.seq_length * model.hidden_size,
            "layers": model.num_layers,
            "accumulation": resolved.run.batch.accumulation,
        }
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(count_updates, size=2)


OURS = "neox_model.parallel"
slow = pytest.mark.slow


@slow
@pytest.mark.parametrize(("run", "width"), [("data", 4), ("data fp16", 2)])
def test_a_data_parallel_update_reduces_each_gradient_once(ranks, run, width):
    for found in (rank[run] for rank in ranks):
        assert found["bytes"] == {
            f"all_reduce in {OURS}.gradient_reduction.start over both": found["parameters"] * width,
            "all_reduce in neox_model.engine.mean_loss.mean_over over both": 4,
        }
        assert set(found["calls"].values()) == {1}


@slow
@pytest.mark.parametrize(("run", "width"), [("tensor", 4), ("tensor fp16", 2)])
def test_tensor_parallel_layers_reduce_hidden_states_and_their_gradients(ranks, run, width):
    for found in (rank[run] for rank in ranks):
        # Forward: the embedding, attention and feed-forward block. Backward: both blocks, and the head.
        calls = found["accumulation"] * (2 * found["layers"] + 1)
        for each in ("forward", "all_reduce"):
            name = f"all_reduce in {OURS}.collectives.{each} over both"
            # The same function sums the norm of the gradients, a float32 number, once.
            norms = int(each == "all_reduce")
            assert found["calls"][name] == calls + norms
            assert found["bytes"][name] == calls * found["hidden"] * width + norms * 4


@slow
def test_pipeline_stages_exchange_hidden_states_and_their_gradients(ranks):
    first, last = (rank["pipeline"] for rank in ranks)
    assert first["accumulation"] == 2
    size = first["accumulation"] * first["hidden"] * 4
    p2p = "deepspeed.runtime.pipe.p2p"
    assert first["bytes"][f"recv in {p2p}.recv over both"] == size
    assert last["bytes"][f"send in {p2p}.send over both"] == size
    # With the shapes of the activations, before the first ones.
    assert first["bytes"][f"send in {p2p}.send over both"] == last["bytes"][f"recv in {p2p}.recv over both"]
    assert first["bytes"][f"send in {p2p}.send over both"] > size


@slow
def test_the_engines_operations_count_as_ours_do(ranks):
    for found in (rank["ZeRO 1"] for rank in ranks):
        size = found["parameters"] * 4
        reduced = "all_reduce in deepspeed.runtime.zero.stage_1_and_2.allreduce_bucket over both"
        assert found["bytes"][reduced] == size
        gathered = [
            each for name, each in found["bytes"].items() if name.startswith("all_gather_into_tensor")
        ]
        assert gathered == [size]


class Work:
    """A handle that counts how often it was waited for."""

    waits = 0

    def wait(self) -> bool:
        self.waits += 1
        return True


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> CollectiveTimes:
    """Times by a clock that advances half a second at each reading, in groups of four ranks."""
    ticks = iter(range(1000))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group.ranks)
    groups = {
        "control": group_of("control", range(8)),
        "world": group_of("world", range(8)),
        "data": group_of("data", (0, 2, 4, 6)),
        "pipe": group_of("pipe", (0, 1)),
    }
    listed = ("all_reduce", "send", "gather")
    return CollectiveTimes(groups, operations=listed, clock=lambda: next(ticks) / 2)


def handle(name: str, ranks: Sequence[int]) -> Any:
    """A process group of torch, of which only the name and ranks are read."""
    return SimpleNamespace(group_name=name, ranks=list(ranks))


def group_of(name: str, ranks: Sequence[int]) -> Group:
    return Group(0, len(ranks), handle(name, ranks), tuple(ranks))


DATA, OTHER = handle("data", (0, 2, 4, 6)), handle("engine's", (0, 2, 4, 5))


def test_an_operation_is_waited_for_and_one_between_two_ranks_when_its_starter_waits(times):
    reduced, sent = Work(), Work()
    message = [torch.ones(1000, dtype=torch.float16), torch.ones(500)]
    assert times.watch("all_reduce", DATA, message, lambda: reduced) is reduced
    work = times.watch("send", OTHER, message, lambda: sent)
    assert (reduced.waits, sent.waits) == (1, 0)
    assert times.totals["all_reduce", "data"] == Total(4, 1, 4000, 0.5)
    assert times.totals["send", "ranks 0, 2, 4, 5"] == Total(4, 1, 4000, 0.0)
    assert [work.wait(), work.wait()] == [True, True]
    assert sent.waits == 2
    assert times.totals["send", "ranks 0, 2, 4, 5"] == Total(4, 1, 4000, 0.5)


def test_operations_that_are_not_listed_are_not_timed(times):
    work = Work()
    assert times.watch("barrier", DATA, [], lambda: work) is work
    assert (work.waits, times.totals) == (0, {})
    times.watch("send", DATA, [], Work)
    hint = "0 calls: all_reduce, gather"
    assert times.table().splitlines()[-1] == hint


def test_a_send_in_the_group_of_all_ranks_counts_for_the_axis_of_its_peer(times):
    world = handle("world", range(8))
    for peer in (1, 4, 7, None):
        times.watch("send", world, [torch.ones(1)], Work, peer)
    assert {group: (total.size, total.count) for (_, group), total in times.totals.items()} == {
        "pipe": (2, 1),
        "data": (4, 1),
        "world": (8, 2),
    }


def test_groups_of_the_same_ranks_are_told_apart_by_name(times):
    for group in (handle("control", range(8)), handle("world", range(8)), handle("engine's", range(8))):
        times.watch("all_reduce", group, [], Work)
    times.watch("send", handle("control", range(8)), [], Work, 1)
    times.watch("all_reduce", handle("engine's", (0, 2, 4, 6)), [], Work)
    assert {key: total.count for key, total in times.totals.items()} == {
        ("all_reduce", "control"): 1,
        ("all_reduce", "world"): 2,
        ("send", "control"): 1,
        ("all_reduce", "data"): 1,
    }


def test_columns_stay_aligned(times):
    times.watch("all_reduce", handle("engine's", (0, 8, 16)), [torch.ones(10**9, dtype=torch.int8)], Work)
    times.watch("all_reduce", DATA, [], Work)
    header, *rows, _ = times.table().splitlines()
    assert " ranks 0, 8, 16 (3) " in "".join(rows)
    assert {len(line) for line in (header, *rows)} == {len(header)}


def test_the_table_shows_both_bandwidths(times):
    for _ in range(2):
        times.watch("all_reduce", DATA, [torch.ones(250_000_000, dtype=torch.int8)], Work)
    header, row, _ = times.table().splitlines()
    assert header.split() == "operation group calls bytes ms in all ms per call GB/s bus GB/s".split()
    # 4 ranks: 2 * 3 / 4 of the message on each link.
    assert row.split() == "all_reduce data (4) 2 500,000,000 1,000.0 500.000 0.500 0.750".split()


def test_the_table_is_logged_once_at_the_end_or_after_an_error(times, caplog):
    caplog.set_level(logging.INFO)
    for ends, text in ((True, "of rank 0 in all:"), (False, "of rank 0 until the error:")):
        caplog.clear()
        callback = CollectivesCallback(times, interval=None, rank=0)
        a_run(callback)
        callback.on_start()
        if ends:
            callback.on_end()
        callback.close()
        assert caplog.text.count("collective operations") == caplog.text.count(text) == 1


def test_nothing_is_replaced_outside_of_the_block():
    before = dict(vars(dist.ProcessGroup))
    with watched_collectives(lambda *arguments: None):
        assert dict(vars(dist.ProcessGroup)) != before
    assert dict(vars(dist.ProcessGroup)) == before


def test_coalesced_operations_count_as_one_when_they_start(monkeypatch):
    """The methods of a group are replaced, because gloo has no coalesced operations."""
    done: list[Any] = []
    for name in ("_start_coalescing", "_end_coalescing", "allreduce"):
        monkeypatch.setattr(dist.ProcessGroup, name, lambda group, *given, name=name: done.append(name))

    def watch(name: str, group: Any, message: Any, call: Any, peer: int | None) -> None:
        done.append((name, len(message)))
        call()

    group, tensor = dist.ProcessGroup(0, 1), torch.ones(3)
    with watched_collectives(watch):
        group._start_coalescing(None)
        group.allreduce([tensor, tensor])
        group.allreduce([tensor])
        group._end_coalescing(None)
        group.allreduce([tensor])
    one_by_one = ["_start_coalescing", "allreduce", "allreduce"]
    assert done == [*one_by_one, ("all_reduce", 3), "_end_coalescing", ("all_reduce", 1), "allreduce"]


def test_messages_and_peers_are_found_by_position_and_by_name(monkeypatch):
    """Of scatter and gather, one rank's part counts."""
    for name in ("allreduce", "_allgather_base", "_reduce_scatter_base", "gather", "scatter", "send", "recv"):
        monkeypatch.setattr(dist.ProcessGroup, name, lambda group, *given, **named: None)
    found: list[Any] = []

    def watch(name: str, group: Any, message: Any, call: Any, peer: int | None) -> None:
        found.append((name, sum(tensor.numel() for tensor in message), peer))

    group, one, two = dist.ProcessGroup(0, 2), torch.ones(1), torch.ones(2)
    with watched_collectives(watch):
        group.allreduce(tensors=[two])
        group._allgather_base(output=two, input=one)
        group._reduce_scatter_base(one, inputTensor=two)
        group.gather(output_tensors=[[one, one]], input_tensors=[one])
        group.gather([[one, one]], [one])
        group.scatter([one], [[one, one]])
        group.send([two], dstRank=1, tag=0)
        group.recv([two], 1, 0)
    assert found == [
        ("all_reduce", 2, None),
        ("all_gather_into_tensor", 2, None),
        ("reduce_scatter_tensor", 2, None),
        ("gather", 1, None),
        ("gather", 1, None),
        ("scatter", 1, None),
        ("send", 2, 1),
        ("recv", 2, 1),
    ]
