"""`num_unique_layers` spelled out: which layer's weights each layer uses."""

from typing import Literal

__all__ = ["weight_owners"]


def weight_owners(
    num_layers: int, unique: int | None, style: Literal["grouped", "spaced"]
) -> tuple[int, ...] | None:
    """The first layer that has the weights of each layer; None where every layer has its own.

    Args:
        num_layers: layers of the model, a multiple of `unique`.
        unique: sets of weights.
        style: of two sets over four layers, grouped is 0, 1, 0, 1 and spaced is 0, 0, 2, 2.
    """
    if unique is None or unique >= num_layers:
        return None
    if style == "grouped":
        return tuple(layer % unique for layer in range(num_layers))
    run = num_layers // unique
    return tuple(layer // run * run for layer in range(num_layers))
