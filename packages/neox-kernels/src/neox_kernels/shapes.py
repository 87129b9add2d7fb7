"""View tensors as matrices: the last dimension is columns, all others are rows."""

import math

from torch import Tensor

__all__ = ["as_rows", "check_equal", "check_width", "columns", "rows", "sum_rows"]


def rows(tensor: Tensor) -> int:
    """Return the number of rows."""
    return math.prod(tensor.shape[:-1])


def columns(tensor: Tensor) -> int:
    """Return the number of columns."""
    return tensor.shape[-1]


def sum_rows(tensor: Tensor) -> Tensor:
    """Sum over rows; one value per column."""
    return tensor.sum(dim=tuple(range(tensor.ndim - 1))) if tensor.ndim > 1 else tensor.clone()


def as_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the tensor and its row stride in elements; copy it only if rows are not evenly spaced."""
    if tensor.is_contiguous():
        return tensor, columns(tensor)
    if tensor.ndim > 1 and tensor.stride(-1) == 1 and tensor.numel() > 0:
        distance = tensor.stride(-2)
        expected = distance
        for size, stride in zip(reversed(tensor.shape[:-1]), reversed(tensor.stride()[:-1]), strict=True):
            if size != 1 and stride != expected:
                break
            expected *= size
        else:
            return tensor, distance
    return tensor.contiguous(), columns(tensor)


def check_width(name: str, parameter: Tensor, like: Tensor) -> None:
    """Check that a weight or bias has one element per column.

    Raises:
        ValueError: its shape does not match.
    """
    if parameter.ndim != 1 or parameter.shape[0] != like.shape[-1]:
        raise ValueError(
            f"{name} has shape {tuple(parameter.shape)}; for a tensor of shape {tuple(like.shape)} it must "
            f"be ({like.shape[-1]},)"
        )


def check_equal(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Check that two tensors have the same shape.

    Raises:
        ValueError: they have not.
    """
    if tensor.shape != other.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and {other_name} {tuple(other.shape)}; "
            "they must be equal"
        )
