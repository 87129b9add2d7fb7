import pytest

from neox_model.metrics.throughput import Throughput, format_duration


def test_rates_per_training_and_per_device():
    rates = Throughput(flops_per_token=2e9, num_devices=4).rates(tokens=6000, seconds=2.0)
    assert rates == pytest.approx(
        {"throughput/tokens_per_second": 3000.0, "throughput/tflops_per_device": 1.5}
    )


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (125, "2:05"), (3661, "1:01:01")]
)
def test_durations_read_as_clocks_do(seconds, text):
    assert format_duration(seconds) == text
