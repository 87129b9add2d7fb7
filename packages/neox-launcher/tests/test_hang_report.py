"""Which ranks lag, and the report that says so."""

import pytest

from neox_launcher.hang import HangWatch
from neox_launcher.hang_report import RankState, lagging_ranks, parse_collectives, render_report
from neox_launcher.worker import ALL_DONE


def state(rank, iteration=5, stacks="Thread:\n  waits", **collectives):
    groups = {name: tuple(value) for name, value in collectives.items()}
    return RankState(
        rank=rank, host=f"h{rank}", iteration=iteration, silent=9.0, stacks=stacks, collectives=groups
    )


def test_a_rank_that_does_not_answer_comes_first():
    states = [state(0, iteration=3), state(1, stacks="")]
    assert lagging_ranks(states) == {1: "does not answer"}


def test_ranks_behind_in_iterations_are_named_but_not_for_one_step():
    assert lagging_ranks([state(0, 5), state(1, 4)]) == {}
    assert lagging_ranks([state(0, 5), state(1, 3)]) == {1: "has done 3 iterations, others 5"}
    assert lagging_ranks([state(0, 1005), state(1, None)]) == {1: "has done 0 iterations, others 1,005"}


def test_ranks_behind_in_a_group_of_theirs_are_named():
    states = [
        state(0, world=[7, "all_reduce"], pair=[2, "all_gather"]),
        state(1, world=[6, "all_reduce"], pair=[2, "all_gather"]),
        state(2, world=[7, "all_reduce"]),
    ]
    reason = "has begun 6 collectives of group world, others 7, the last all_reduce"
    assert lagging_ranks(states) == {1: reason}


def test_the_report_has_verdict_table_and_stacks_by_what_is_the_same():
    one = "Current thread 0x00007f (most recent call first):\n  in wait"
    other = "Current thread 0x00008f (most recent call first):\n  in wait"
    states = [state(0, stacks=one, world=[3, "all_reduce"]), state(1, stacks=other), state(2, 2, stacks="x")]
    text = render_report(states, reason="no progress for 5 s")
    verdict = "no progress for 5 s\n\nrank 2 on h2 has done 2 iterations, others 5\n\n"
    assert text.startswith(verdict)
    assert "0     h0    5          9 s         world: 3 all_reduce\n" in text
    assert "--- ranks 0-1\nThread:\n  in wait\n" in text
    assert "--- rank 2\nx\n" in text


def test_nobody_behind_is_said():
    assert "No rank is behind the others" in render_report([state(0), state(1)], reason="r")


@pytest.mark.parametrize("answer", ["", "no json", "[1]", '{"g": 3}', '{"g": ["a", "b"]}'])
def test_an_answer_that_cannot_be_read_is_none(answer):
    assert parse_collectives(answer) == {}


def test_an_answer_is_read():
    assert parse_collectives('{"0:world": [4, "gloo:all_reduce"]}') == {"0:world": (4, "gloo:all_reduce")}


# When it is a hang


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("neox_launcher.hang.time.monotonic", lambda: now[0])
    return now


def test_the_clock_starts_with_the_first_iteration_of_any_rank(clock):
    watch = HangWatch(10)
    clock[0] += 1000
    assert not watch.has_stalled(2)
    watch.hear(0, 1)
    clock[0] += 9
    watch.hear(0, 2)
    assert not watch.has_stalled(2)
    clock[0] += 11
    assert watch.has_stalled(2)


def test_who_is_silent_while_another_is_at_work_waits_for_it(clock):
    watch = HangWatch(10)
    for rank in (0, 1):
        watch.hear(rank, 4)
    for _ in range(30):
        clock[0] += 1
        watch.hear(1, 4)
    assert not watch.has_stalled(2)
    clock[0] += 11
    assert watch.has_stalled(2)


def test_ranks_that_are_done_are_not_waited_for(clock):
    watch = HangWatch(10)
    watch.hear(0, 1)
    watch.hear(1, 1)
    watch.hear(0, ALL_DONE)
    watch.forget([1])
    clock[0] += 1000
    assert not watch.has_stalled(2)


def test_who_has_waited_for_one_that_is_done_now_has_its_own_time(clock):
    watch = HangWatch(10)
    for rank in (0, 1):
        watch.hear(rank, 4)
    clock[0] += 30
    watch.hear(1, ALL_DONE)
    assert not watch.has_stalled(2)
    clock[0] += 11
    assert watch.has_stalled(2)


def test_without_a_timeout_nothing_is_a_hang(clock):
    watch = HangWatch(None)
    watch.hear(0, 1)
    clock[0] += 1e9
    assert not watch.has_stalled(1)
