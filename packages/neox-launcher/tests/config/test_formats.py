import pytest

from neox_config.formats import format_duration, format_mfu, format_tflops


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0 s"), (12, "12 s"), (60, "1:00"), (3661, "1:01:01"), (86400 * 3 + 3600 * 4 + 300, "3 d 04:05")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("tflops", "text"), [(130.4, "130 TFLOP/s"), (0.1, "0.1 TFLOP/s"), (0.0999, "99.9 GFLOP/s")]
)
def test_speeds(tflops, text):
    assert format_tflops(tflops) == text


def test_utilization_is_named_by_both_conventions():
    assert format_mfu(0.51532, 0.48071) == "MFU 51.5% (causal 48.1%)"
