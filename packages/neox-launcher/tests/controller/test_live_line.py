"""The live line fits into every width, and drops its least important fields first."""

import pytest

from neox_launcher.controller.live_line import LiveState, render_line
from support.refusals import shows

METRICS = {
    "loss/train": 2.34567,
    "throughput/tokens_per_second": 12345.6,
    "throughput/mfu": 0.415,
    "throughput/mfu_causal": 0.388,
    "throughput/tflops_per_device": 129.5,
    "optimizer/learning_rate": 6e-4,
    "optimizer/loss_scale": 65536.0,
    "loss/validation": 2.4,
    "memory/bytes": 12.5 * 2**30,
    "another/metric": 1.0,
}
TRAINING = LiveState(
    iteration=200,
    last_iteration=320_000,
    metrics=METRICS,
    seconds_per_iteration=1.5,
    reported=100.0,
)
WHOLE = (
    "5 d 13:15 left | iteration 200/320,000 | loss 2.3457 | 12,346 tokens/s | MFU 41.5% (causal 38.8%) | "
    "130 TFLOP/s | lr 6.000e-04 | loss scale 65536 | validation loss 2.4000 | memory 12.5 GiB"
)
STATES = {
    "starting": LiveState(phase="starting 4 hosts", since=90.0),
    "training": TRAINING,
    "saving": LiveState(
        **{name: getattr(TRAINING, name) for name in ("iteration", "last_iteration", "metrics")},
        phase="saving iteration 200",
        since=90.0,
        request="stopping",
    ),
    "wide characters": LiveState(phase="保存しています 检查点", since=90.0, iteration=7, last_iteration=9),
    "combined characters": LiveState(phase="e\u0301" * 30, since=90.0),
    "nothing": LiveState(),
}


@pytest.mark.parametrize("name", STATES)
def test_the_line_is_never_wider_than_the_terminal(name):
    for width in (*range(201), 300):
        line = render_line(STATES[name], now=102.0, width=width)
        assert line.cell_len <= width
        assert "\n" not in line.plain


def test_the_time_left_is_first_and_the_least_important_fields_are_dropped_first():
    assert render_line(TRAINING, now=100.0, width=300).plain == WHOLE
    fields = WHOLE.split(" | ")
    for width in range(len(fields[0]), 300):
        shown = render_line(TRAINING, now=100.0, width=width).plain
        expected = max(
            (" | ".join(fields[:n]) for n in range(1, 11) if len(" | ".join(fields[:n])) <= width), key=len
        )
        assert shown == expected
    assert render_line(TRAINING, now=100.0, width=8).plain == "5 d 13:1"


def test_a_phase_is_shown_with_its_time():
    line = render_line(STATES["saving"], now=102.0, width=60).plain
    assert line == "- saving iteration 200 (12 s) | stopping"
    assert render_line(STATES["saving"], now=102.25, width=30).plain == "\\ saving iteration 200 (12 s)"


def test_the_time_left_counts_down_between_reports():
    short = LiveState(iteration=10, last_iteration=50, seconds_per_iteration=2.0, reported=100.0)
    assert [short.seconds_left(now) for now in (100.0, 130.0, 1000.0)] == [80.0, 50.0, 0.0]
    done = LiveState(iteration=50, last_iteration=50, seconds_per_iteration=2.0)
    assert done.seconds_left(0.0) is None


def test_a_job_without_reports_says_so():
    assert "no iteration for" not in render_line(TRAINING, now=159.0, width=300).plain
    assert shows(render_line(TRAINING, now=165.0, width=300).plain, "1:05")
    assert STATES["saving"].seconds_silent(9999.0) is None


def test_numbers_that_are_not_finite_are_shown():
    line = render_line(
        LiveState(iteration=1, last_iteration=2, metrics={"loss/train": float("nan")}), now=0, width=80
    )
    assert line.plain == "iteration 1/2 | loss nan"
