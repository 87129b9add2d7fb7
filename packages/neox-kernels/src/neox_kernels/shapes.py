"""Tensors seen as matrices: all dimensions but the last are rows, the last is columns."""

import math

from torch import Tensor

__all__ = ["as_rows", "check_width", "columns", "rows", "sum_rows"]


def rows(tensor: Tensor) -> int:
    """How many rows the tensor has."""
    return math.prod(tensor.shape[:-1])


def columns(tensor: Tensor) -> int:
    """How many elements a row has."""
    return tensor.shape[-1]


def sum_rows(tensor: Tensor) -> Tensor:
    """The sum over rows, one value per column."""
    return tensor.sum(dim=tuple(range(tensor.ndim - 1))) if tensor.ndim > 1 else tensor.clone()


def as_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """The tensor and the distance between its rows in elements; copied only if rows are unevenly spaced."""
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
    """Check a weight or bias against the tensor it belongs to.

    Raises:
        ValueError: it does not have one element per column.
    """
    if parameter.shape != like.shape[-1:]:
        raise ValueError(
            f"{name} has shape {tuple(parameter.shape)}; with a tensor of shape {tuple(like.shape)} it must "
            "be "
            f"({like.shape[-1]},)"
        )
