"""Lagging ranks, the hang report, and the detection of hangs."""

import threading
from pathlib import Path

import pytest

from neox_launcher.controller import hang
from neox_launcher.controller.hang import HangWatch, _written
from neox_launcher.controller.hang_report import (
    NO_AGENT_ANSWER,
    RankState,
    lagging_ranks,
    parse_collectives,
    render_report,
)
from neox_launcher.worker.reporting import ALL_DONE
from support.refusals import shows


def state(rank, iteration=5, stacks="Thread:\n  waits", process="S 1", **collectives):
    groups = {name: tuple(value) for name, value in collectives.items()}
    return RankState(
        rank=rank,
        host=f"h{rank}",
        iteration=iteration,
        silent=9.0,
        process=process,
        stacks=stacks,
        collectives=groups,
    )


def test_a_rank_that_does_not_answer_comes_first():
    states = [state(0, iteration=3), state(1, stacks="")]
    assert lagging_ranks(states) == {1: "does not answer"}


def test_a_stopped_process_comes_before_those_that_do_not_answer():
    states = [state(0, stacks=""), state(1, stacks="", process="T 123"), state(2)]
    reason = "is stopped (process state T, as after SIGSTOP); continue it with kill -CONT 123"
    assert lagging_ranks(states) == {1: reason}
    assert lagging_ranks([state(0, process="T 123")]) == {0: reason}


def test_the_reason_for_no_answer_is_named():
    states = [state(0, stacks="", process="D 7"), state(1, stacks="", process=NO_AGENT_ANSWER), state(2)]
    assert lagging_ranks(states) == {
        0: "does not answer; process 7 waits for a disk, a file server or a device (process state D)",
        1: "does not answer, nor does its agent; the host is overloaded or cannot be reached, or the agent "
        "is stopped",
    }


def test_ranks_behind_in_iterations_are_named_but_not_for_one_step():
    assert lagging_ranks([state(0, 5), state(1, 4)]) == {}
    assert shows(lagging_ranks([state(0, 5), state(1, 3)]), "1: ", "3 iterations", "5")
    assert shows(lagging_ranks([state(0, 1005), state(1, None)]), "1: ", "0 iterations", "1,005")


def test_ranks_behind_in_collectives_of_a_group_are_named():
    states = [
        state(0, world=[7, "all_reduce"], pair=[2, "all_gather"]),
        state(1, world=[6, "all_reduce"], pair=[2, "all_gather"]),
        state(2, world=[7, "all_reduce"]),
    ]
    reason = "has started 6 collectives of group world, others 7, the last all_reduce"
    assert lagging_ranks(states) == {1: reason}


def test_the_report_has_a_verdict_a_table_and_grouped_stacks():
    one = "Current thread 0x00007f (most recent call first):\n  in wait"
    other = "Current thread 0x00008f (most recent call first):\n  in wait"
    states = [state(0, stacks=one, world=[3, "all_reduce"]), state(1, stacks=other), state(2, 2, stacks="x")]
    text = render_report(states, reason="no progress for 5 s")
    verdict = "no progress for 5 s\n\nrank 2 on h2 has completed 2 iterations, others 5\n\n"
    assert text.startswith(verdict)
    assert shows(text, "0", "h0", "5")
    assert "--- ranks 0-1" in text
    assert "--- rank 2" in text


def test_the_report_states_that_no_rank_is_behind():
    assert "No rank is" in render_report([state(0), state(1)], reason="r")


@pytest.mark.parametrize("answer", ["", "no json", "[1]", '{"g": 3}', '{"g": ["a", "b"]}'])
def test_a_malformed_answer_gives_no_collectives(answer):
    assert parse_collectives(answer) == {}


def test_an_answer_is_parsed():
    assert parse_collectives('{"0:world": [4, "gloo:all_reduce"]}') == {"0:world": (4, "gloo:all_reduce")}


# Detection of hangs


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("neox_launcher.controller.hang.time.monotonic", lambda: now[0])
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


def test_a_training_must_finish_its_first_iteration_in_time(clock):
    watch = HangWatch(10, first_timeout=100)
    clock[0] += 1000
    assert not watch.has_stalled(2)
    watch.start()
    clock[0] += 99
    assert not watch.has_stalled(2)
    assert (watch.iteration, watch.state_of(1)) == (None, (None, 99))
    clock[0] += 2
    assert watch.has_stalled(2)
    assert shows(watch.reason, "100 s", "(first-iteration-timeout)")
    watch.hear(1, 1)
    assert not watch.has_stalled(2)
    assert watch.iteration == 1
    clock[0] += 11
    assert watch.has_stalled(2)
    assert shows(watch.reason, "10 s", "(hang-timeout)")


def test_workers_that_end_before_the_first_iteration_are_no_hang(clock):
    watch = HangWatch(10, first_timeout=100)
    watch.start()
    watch.forget([0, 1])
    watch.hear(1, ALL_DONE)
    clock[0] += 1000
    assert not watch.has_stalled(2)
    assert watch.iteration is None


def test_silent_ranks_are_no_hang_while_another_rank_reports(clock):
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


def test_the_end_of_a_rank_restarts_the_timeout(clock):
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


# Writing the report


def test_a_report_goes_to_the_first_folder_that_takes_it(tmp_path):
    (tmp_path / "full").symlink_to("/dev/null")
    words = _written([tmp_path / "full", tmp_path / "logs" / "new"], "stacks \udcff\n")
    [file] = (tmp_path / "logs" / "new").iterdir()
    assert words == f"full report: {file}"
    assert file.read_text() == "stacks ?\n"


def test_a_report_that_cannot_be_written_is_printed(tmp_path):
    (tmp_path / "file").touch()
    words = _written([tmp_path / "file"], "stacks\n")
    assert words.startswith("the report could not be written (")
    assert words.endswith("):\nstacks\n")


def test_a_file_server_that_hangs_does_not_delay_the_report(tmp_path, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(hang, "_WRITE_SECONDS", 0.1)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: released.wait(60))
    words = _written([tmp_path], "stacks\n")
    released.set()
    assert shows(words, "no folder answered")
