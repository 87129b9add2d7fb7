"""Frequencies of rotary embeddings that are scaled to longer sequences, by the name of the formula."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["SCALINGS", "scaled_frequencies"]

# (frequency_R, base, settings) -> scaled frequency_R. R pairs of channels; frequencies in radians per token.
Scaling = Callable[[Tensor, float, Mapping[str, Any]], Tensor]


def scaled_frequencies(frequency_R: Tensor, base: float, settings: Mapping[str, Any]) -> Tensor:
    """Return the frequencies of a formula.

    Args:
        frequency_R: float32 frequencies without scaling.
        base: base of their geometric series.
        settings: `type` and the settings of that formula, of longrope with the `length` of the sequence;
            empty: no scaling.
    """
    return SCALINGS[settings["type"]](frequency_R, base, settings) if settings else frequency_R


def _linear(frequency_R: Tensor, base: float, settings: Mapping[str, Any]) -> Tensor:
    """Divide all frequencies. Source: arXiv:2306.15595."""
    return frequency_R / settings["factor"]


def _llama3(frequency_R: Tensor, base: float, settings: Mapping[str, Any]) -> Tensor:
    """Divide long wavelengths, keep short ones, interpolate between. Source: arXiv:2407.21783, Llama 3.1."""
    length, factor = settings["original_max_position_embeddings"], settings["factor"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    wavelength_R = 2 * math.pi / frequency_R
    share_R = (length / wavelength_R - low) / (high - low)
    between_R = (1 - share_R) * frequency_R / factor + share_R * frequency_R
    scaled_R = torch.where(wavelength_R > length / low, frequency_R / factor, between_R)
    return torch.where(wavelength_R < length / high, frequency_R, scaled_R)


def _yarn(frequency_R: Tensor, base: float, settings: Mapping[str, Any]) -> Tensor:
    """Divide the frequencies of channels that turn rarely, with a ramp. Source: arXiv:2309.00071."""
    pairs, length = len(frequency_R), settings["original_max_position_embeddings"]

    def channel(turns: float) -> float:
        """Return the pair of channels that makes this number of turns in the original length."""
        return pairs * math.log(length / (turns * 2 * math.pi)) / math.log(base)

    first, last = channel(settings["beta_fast"]), channel(settings["beta_slow"])
    if settings["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    span = last - first or 0.001
    ramp_R = ((torch.arange(pairs, dtype=torch.float32, device=frequency_R.device) - first) / span).clamp(
        0, 1
    )
    # Not 1 - ramp: the same order of operations as elsewhere, so that tables agree to the last bit.
    kept_R = 1 - ramp_R
    return frequency_R / settings["factor"] * (1 - kept_R) + frequency_R * kept_R


def _longrope(frequency_R: Tensor, base: float, settings: Mapping[str, Any]) -> Tensor:
    """Divide each frequency by its factor for the length of the sequence. Source: arXiv:2402.13753, Phi-3."""
    is_long = settings["length"] > settings["original_max_position_embeddings"]
    factors = settings["long_factor" if is_long else "short_factor"]
    width = 2 * len(frequency_R)
    factor_R = torch.tensor(factors, dtype=torch.float32, device=frequency_R.device)
    # Not the frequency divided by its factor, which differs in the last bit.
    even_R = torch.arange(0, width, 2, dtype=torch.float32, device=frequency_R.device)
    return 1.0 / (factor_R * base ** (even_R / width))


SCALINGS: Mapping[str, Scaling] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
