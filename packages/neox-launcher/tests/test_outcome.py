"""Which failure the others followed from."""

from dataclasses import replace

import pytest

from neox_launcher.outcome import Failure, judge

FIRST = Failure(rank=3, host="h", time=10.0, message="why", exit_code=7)
LATER = Failure(rank=1, host="h", time=11.0, message="the other one does not answer")


def test_the_first_by_time_decides():
    outcome = judge([LATER, FIRST], [])
    assert (outcome.exit_code, outcome.first_failure, outcome.num_failures) == (7, FIRST, 2)


def test_who_was_ended_by_the_agent_did_not_fail_first():
    ended = replace(FIRST, exit_code=143, unreported=True)
    assert judge([ended, LATER], []).first_failure == LATER
    assert judge([ended], []).first_failure == ended


@pytest.mark.parametrize(("signals", "code"), [([], 0), ([2], 130), ([15, 15], 143)])
def test_without_failures_the_signal_decides(signals, code):
    outcome = judge([], signals)
    assert (outcome.exit_code, outcome.was_stopped) == (code, bool(signals))


def test_after_a_request_to_stop_only_reported_failures_count():
    died = replace(FIRST, unreported=True)
    assert judge([died], [15]).exit_code == 143
    assert judge([died, LATER], [15]).first_failure == LATER


def test_ages_travel_instead_of_times(monkeypatch):
    monkeypatch.setattr("neox_launcher.outcome.time.time", lambda: 25.0)
    message = FIRST.as_message()
    monkeypatch.setattr("neox_launcher.outcome.time.time", lambda: 1025.0)
    assert Failure.from_message(message) == replace(FIRST, time=1010.0)


def test_failures_say_who_and_show_what_nobody_has_seen():
    assert str(FIRST) == "worker 3 on h failed:\nwhy"
    assert str(replace(FIRST, rank=None)) == "host h: why"
    assert str(replace(FIRST, rank=None, host="")) == "why"
    unseen = replace(FIRST, unreported=True, output="last words")
    assert str(unseen) == "worker 3 on h failed:\nwhy\nwhat it printed last:\nlast words"
