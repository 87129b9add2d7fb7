"""A plain float64 reading of the compressed average of several replicas, in one process."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["PlainAverage"]


def _compressed(values: Tensor, is_live: Tensor) -> Tensor:
    """Return the signs times the mean absolute value of the live elements."""
    if not bool(is_live.any()):
        return torch.zeros_like(values)
    return (2.0 * (values >= 0).double() - 1.0) * values[is_live].abs().mean() * is_live


class PlainAverage:
    """Averages one vector of several replicas.

    Args:
        length: elements of the vector.
        replicas: number of replicas; replica j serves part j.
        part: elements of a part.
    """

    def __init__(self, length: int, *, replicas: int, part: int) -> None:
        self.worker_errors = [torch.zeros(length, dtype=torch.float64) for _ in range(replicas)]
        self.server_error = torch.zeros(length, dtype=torch.float64)
        self._parts = [slice(start, min(start + part, length)) for start in range(0, length, part)]

    def __call__(self, vectors: Sequence[Tensor], is_live: Tensor) -> Tensor:
        """Return the average that all replicas receive."""
        sent = []
        for vector, error in zip(vectors, self.worker_errors, strict=True):
            total = vector + error
            encoded = torch.cat([_compressed(total[part], is_live[part]) for part in self._parts])
            error.copy_(total - encoded)
            sent.append(encoded)
        mean = torch.stack(sent).mean(dim=0) + self.server_error
        result = torch.cat([_compressed(mean[part], is_live[part]) for part in self._parts])
        self.server_error = mean - result
        return result
