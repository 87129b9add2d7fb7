import pytest

from neox_model.metrics.throughput import Throughput


def test_rates_per_training_and_per_device():
    throughput = Throughput(flops_per_token=2e9, causal_flops_per_token=1.5e9, num_devices=4)
    assert throughput.rates(tokens=6000, seconds=2.0) == pytest.approx(
        {"throughput/tokens_per_second": 3000.0, "throughput/tflops_per_device": 1.5}
    )


def test_utilization_by_both_conventions():
    # GPT-NeoX 1.3B on an H100: 24 layers of 12 x 2048^2, the head, and attention of 2,048 tokens, by hand.
    matrices = 24 * 12 * 2048**2 + 50_304 * 2048
    attention = 24 * 2048 * 2048
    throughput = Throughput(
        flops_per_token=6 * (matrices + 2 * attention),
        causal_flops_per_token=6 * (matrices + attention),
        num_devices=1,
        peak_tflops=989.0,
    )
    rates = throughput.rates(tokens=8 * 2048, seconds=0.2917)
    assert rates["throughput/mfu"] == pytest.approx(0.515, abs=5e-4)
    assert rates["throughput/mfu_causal"] == pytest.approx(0.481, abs=5e-4)
    assert rates["throughput/tflops_per_device"] == pytest.approx(rates["throughput/mfu"] * 989)
