"""Names of the matrices that low-rank adapters can be added to."""

from typing import Literal, get_args

__all__ = ["ADAPTED", "AdaptedName", "adapter_scale"]

AdaptedName = Literal["qkv", "dense", "up", "gate", "down"]
ADAPTED: tuple[str, ...] = get_args(AdaptedName)


def adapter_scale(*, rank: int, alpha: float) -> float:
    """Return the factor of an adapter's product (arXiv:2106.09685)."""
    return alpha / rank
