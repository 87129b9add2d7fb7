"""Where the parts of a run write metrics: to all configured writers, in the order of the iterations."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from neox_model.metrics.writers.base import MetricWriter

__all__ = ["SKIPPED", "SPIKE", "SPIKE_LIMIT", "Metrics", "read_back"]

SKIPPED, SPIKE, SPIKE_LIMIT = "optimizer/skipped_iterations", "loss/spike", "loss/spike_limit"


def read_back(values: Sequence[Tensor | float | None]) -> list[float | None]:
    """Return the values as floats, read with one synchronization; some may be scalar tensors on a device.

    None stays None.
    """
    # float64 holds every float32 and every count exactly.
    tensors = [value.double().reshape(()) for value in values if isinstance(value, Tensor)]
    # With offloaded states DeepSpeed leaves some numbers on the host and others on the device.
    read = {
        device: iter(torch.stack([tensor for tensor in tensors if tensor.device == device]).tolist())
        for device in {tensor.device for tensor in tensors}
    }
    return [next(read[value.device]) if isinstance(value, Tensor) else value for value in values]


class Metrics:
    """Writes metrics of iterations.

    Values that are on the device are deferred and read together, because each reading waits for the device.

    Attributes:
        writers: receive the metrics; empty on all ranks except one.
    """

    def __init__(self) -> None:
        self.writers: list[MetricWriter] = []
        self._pending: list[tuple[int, Mapping[str, Tensor | float | None]]] = []

    def defer(self, metrics: Mapping[str, Tensor | float | None], iteration: int) -> None:
        """Store metrics until the next write; None is left out."""
        self._pending.append((iteration, metrics))

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Write metrics, if there are any, after those that were deferred; waits for the device."""
        if not metrics:
            return
        self.write_pending()
        for writer in self.writers:
            writer.write(metrics, iteration)
            writer.flush()

    def write_pending(self) -> None:
        """Write all deferred metrics; waits for the device. Call it before a synchronization."""
        if not self._pending:
            return
        read = iter(read_back([value for _, metrics in self._pending for value in metrics.values()]))
        for iteration, metrics in self._pending:
            values = {name: next(read) for name in metrics}
            shown = {
                name: value for name, value in values.items() if value is not None and _is_shown(name, value)
            }
            for writer in self.writers:
                writer.write(shown, iteration)
        self._pending.clear()
        for writer in self.writers:
            writer.flush()


def _is_shown(name: str, value: float) -> bool:
    """Return False for a count of exceptional events that is 0, and for an infinite limit."""
    return bool(value) if name in (SKIPPED, SPIKE) else name != SPIKE_LIMIT or not math.isinf(value)
