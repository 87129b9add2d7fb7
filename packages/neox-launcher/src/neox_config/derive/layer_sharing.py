"""Expansion of `num_unique_layers`: the layer whose weights each layer uses."""

from typing import Literal

__all__ = ["weight_owners"]


def weight_owners(
    num_layers: int, unique: int | None, style: Literal["grouped", "spaced"]
) -> tuple[int, ...] | None:
    """Return the first layer with the same weights for each layer, or None if no weights are shared.

    Args:
        num_layers: number of layers of the model, a multiple of `unique`.
        unique: number of distinct sets of weights.
        style: order of sharing; for two sets and four layers, grouped is 0, 1, 0, 1, spaced is 0, 0, 2, 2.
    """
    if unique is None or unique >= num_layers:
        return None
    if style == "grouped":
        return tuple(layer % unique for layer in range(num_layers))
    run = num_layers // unique
    return tuple(layer // run * run for layer in range(num_layers))
