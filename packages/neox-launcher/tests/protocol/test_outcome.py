"""The first of several failures, and the exit code of a launch."""

from dataclasses import replace

import pytest

from neox_launcher.protocol.outcome import Failure, judge

FIRST = Failure(rank=3, host="h", time=10.0, message="why", exit_code=7)
LATER = Failure(rank=1, host="h", time=11.0, message="the other one does not answer")


def test_the_earliest_failure_decides():
    outcome = judge([LATER, FIRST], [])
    assert (outcome.exit_code, outcome.first_failure, outcome.num_failures) == (7, FIRST, 2)


@pytest.mark.parametrize(("signals", "code"), [([], 0), ([2], 130), ([15, 15], 143)])
def test_without_failures_the_signal_decides(signals, code):
    outcome = judge([], signals)
    assert (outcome.exit_code, outcome.was_stopped) == (code, bool(signals))


def test_after_a_request_to_stop_only_reported_failures_are_failures():
    died = replace(FIRST, unreported=True)
    assert judge([died], [15]).exit_code == 143
    assert judge([died, LATER], [15]).first_failure == LATER


def test_messages_contain_ages_instead_of_times(monkeypatch):
    monkeypatch.setattr("neox_launcher.protocol.outcome.time.time", lambda: 25.0)
    message = FIRST.as_message()
    monkeypatch.setattr("neox_launcher.protocol.outcome.time.time", lambda: 1025.0)
    assert Failure.from_message(message) == replace(FIRST, time=1010.0)


def test_times_of_equal_clocks_do_not_depend_on_the_speed_of_messages(monkeypatch):
    now = [25.0]
    monkeypatch.setattr("neox_launcher.protocol.outcome.time.time", lambda: now[0])
    message = FIRST.as_message()
    now[0] += 0.5
    assert Failure.from_message(message) == FIRST


def test_failures_name_the_worker_and_show_its_last_output():
    assert str(FIRST) == "worker 3 on h failed:\nwhy"
    assert str(replace(FIRST, rank=None)) == "host h: why"
    assert str(replace(FIRST, rank=None, host="")) == "why"
    unseen = replace(FIRST, unreported=True, output="last words")
    assert str(unseen) == "worker 3 on h failed:\nwhy\nlast output:\nlast words"
