import pytest

from neox_model.metrics.throughput import Throughput


def test_rates_per_training_and_per_device():
    rates = Throughput(flops_per_token=2e9, num_devices=4).rates(tokens=6000, seconds=2.0)
    assert rates == pytest.approx(
        {"throughput/tokens_per_second": 3000.0, "throughput/tflops_per_device": 1.5}
    )
