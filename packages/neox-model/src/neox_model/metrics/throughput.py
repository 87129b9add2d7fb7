"""How fast a training goes, in tokens and in floating-point operations per second."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

__all__ = ["Throughput", "flops_per_token", "format_duration"]


def flops_per_token(
    shapes: Iterable[tuple[str, tuple[int, ...]]], *, num_layers: int, hidden_size: int, seq_length: int
) -> float:
    """Floating-point operations that training needs for one token, without recomputed activations.

    6 per element of every matrix that multiplies (2 forward, 4 backward), and 12 * layers * hidden *
    sequence for attention scores and values, without the halving that a causal kernel may gain. Looking up
    an embedding is free; a tied embedding counts once, as the output projection.

    Args:
        shapes: logical name and whole shape of every parameter.
        num_layers: attention layers.
        hidden_size: width between layers.
        seq_length: tokens per sample.

    Source: arXiv:2204.02311, appendix B.
    """
    matrices = {name: prod(shape) for name, shape in shapes if len(shape) >= 2}
    lookups = {"embedding.position_embeddings.weight"}
    if "lm_head.weight" in matrices:
        lookups.add("embedding.word_embeddings.weight")
    multiplied = sum(count for name, count in matrices.items() if name not in lookups)
    return 6.0 * multiplied + 12.0 * num_layers * hidden_size * seq_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Rates from a number of tokens and the time they took.

    Args:
        flops_per_token: see the function of that name.
        num_devices: the work is shared by so many.
    """

    flops_per_token: float
    num_devices: int

    def rates(self, tokens: int, seconds: float) -> dict[str, float]:
        """Metrics: tokens/s of the whole training, TFLOP/s of each device."""
        tokens_per_second = tokens / seconds
        return {
            "throughput/tokens_per_second": tokens_per_second,
            "throughput/tflops_per_device": tokens_per_second
            * self.flops_per_token
            / self.num_devices
            / 1e12,
        }


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds, the leading zeros left out: `2:05`, `1:00:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
