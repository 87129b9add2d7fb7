"""How fast a training goes, in tokens and in floating-point operations per second."""

from dataclasses import dataclass

__all__ = ["Throughput", "format_duration"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Rates from a number of tokens and the time they took.

    Args:
        flops_per_token: floating-point operations that training needs for one token, without recomputation.
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
