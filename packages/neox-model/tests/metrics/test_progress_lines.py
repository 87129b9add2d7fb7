import logging

import pytest

from neox_model.metrics.progress_lines import ProgressLines


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_lines_come_after_three_seconds_and_then_every_ten(caplog) -> None:
    now = iter(range(0, 1000, 2))
    progress = ProgressLines("validation", "micro-batches", 8, clock=lambda: float(next(now)))
    assert list(progress.track("abcdefgh")) == list("abcdefgh")
    assert caplog.messages == [
        "validation: 2 of 8 micro-batches, 12 s left",
        "validation: 7 of 8 micro-batches, 1 s left",
    ]


def test_an_unknown_amount_has_no_time_left(caplog) -> None:
    times = iter([0.0, 1.0, 4.0])
    progress = ProgressLines("eval-data", "tokens", None, clock=lambda: next(times))
    progress.add(1_000)
    progress.add(1_000)
    assert caplog.messages == ["eval-data: 2,000 tokens"]


def test_an_amount_may_be_found_out_during_the_work(caplog) -> None:
    times = iter([0.0, 4.0, 14.0])
    progress = ProgressLines("eval-data", "tokens", None, clock=lambda: next(times))
    progress.expect(4_000, is_estimate=True)
    progress.add(1_000)
    progress.expect(5_000, is_estimate=False)
    progress.add(1_500)
    assert caplog.messages == [
        "eval-data: 1,000 of about 4,000 tokens, 12 s left",
        "eval-data: 2,500 of 5,000 tokens, 14 s left",
    ]
