"""Read scalars back from the device with a single synchronization."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["read_back"]


def read_back(values: Sequence[Tensor | float | None]) -> list[float | None]:
    """Return the values as floats; some may be scalar tensors on a device. None stays None."""
    # float64 holds every float32 and every count exactly.
    tensors = [value.double().reshape(()) for value in values if isinstance(value, Tensor)]
    # With offloaded states DeepSpeed leaves some numbers on the host and others on the device.
    read = {
        device: iter(torch.stack([tensor for tensor in tensors if tensor.device == device]).tolist())
        for device in {tensor.device for tensor in tensors}
    }
    return [next(read[value.device]) if isinstance(value, Tensor) else value for value in values]
