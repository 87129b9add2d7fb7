"""Compute the throughput of a training, in tokens and floating-point operations per second."""

from dataclasses import dataclass

__all__ = ["Throughput", "format_duration"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Computes rates from a number of tokens and their time.

    Args:
        flops_per_token: floating-point operations of training per token, without recomputation.
        num_devices: number of devices of the training.
    """

    flops_per_token: float
    num_devices: int

    def rates(self, tokens: int, seconds: float) -> dict[str, float]:
        """Return the metrics tokens/s of the whole training and TFLOP/s per device."""
        tokens_per_second = tokens / seconds
        return {
            "throughput/tokens_per_second": tokens_per_second,
            "throughput/tflops_per_device": tokens_per_second
            * self.flops_per_token
            / self.num_devices
            / 1e12,
        }


def format_duration(seconds: float) -> str:
    """Format hours, minutes and seconds without leading zeros: `2:05`, `1:00:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
