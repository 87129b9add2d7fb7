import pytest

from neox_model.metrics.throughput import Throughput, flops_per_token, format_duration

TIED = [
    ("embedding.word_embeddings.weight", (100, 8)),
    ("embedding.position_embeddings.weight", (16, 8)),
    ("layers.0.attention.qkv.weight", (24, 8)),
    ("layers.0.attention.qkv.bias", (24,)),
]


def flops(shapes):
    return flops_per_token(shapes, num_layers=1, hidden_size=8, seq_length=16)


def test_a_tied_embedding_counts_as_the_output_projection():
    assert flops(TIED) == 6 * (100 * 8 + 24 * 8) + 12 * 1 * 8 * 16


def test_an_untied_embedding_is_only_looked_up():
    assert flops([*TIED, ("lm_head.weight", (100, 8))]) == flops(TIED)


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
