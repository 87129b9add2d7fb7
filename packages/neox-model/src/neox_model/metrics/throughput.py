"""Compute the throughput of a run, in tokens and floating-point operations per second."""

from dataclasses import dataclass

__all__ = ["Throughput"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Computes rates from a number of tokens and their time.

    Args:
        flops_per_token: floating-point operations of training per token, without recomputation; attention
            as if every token saw the whole sequence.
        causal_flops_per_token: the same without what the causal mask hides.
        num_devices: number of devices of the run.
        peak_tflops: peak TFLOP/s of one device; None if it is not known.
    """

    flops_per_token: float
    causal_flops_per_token: float
    num_devices: int
    peak_tflops: float | None = None

    def rates(self, tokens: int, seconds: float) -> dict[str, float]:
        """Return tokens/s of the whole run, TFLOP/s per device, and the share of the peak (MFU).

        TFLOP/s and `throughput/mfu` count attention as if every token saw the whole sequence;
        `throughput/mfu_causal` leaves out what the causal mask hides.

        Source: arXiv:2204.02311, appendix B, for the MFU.
        """
        tokens_per_second = tokens / seconds
        tflops = tokens_per_second * self.flops_per_token / self.num_devices / 1e12
        rates = {
            "throughput/tokens_per_second": tokens_per_second,
            "throughput/tflops_per_device": tflops,
        }
        if self.peak_tflops is not None:
            rates["throughput/mfu"] = tflops / self.peak_tflops
            causal = self.causal_flops_per_token / self.flops_per_token
            rates["throughput/mfu_causal"] = causal * rates["throughput/mfu"]
        return rates
