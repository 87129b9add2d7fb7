"""Count how often the host waits for a number from the device; every device shows it, the CPU too."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ReadBacks"]


class ReadBacks(TorchDispatchMode):
    """Within, `count` is the number of scalars that were read back."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))
