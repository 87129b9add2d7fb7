"""From the logits of one place to the token that comes there.

The filters are applied in GPT-NeoX's order: temperature, then top_k, then top_p. Everything is computed on
the CPU in float32, so that equal logits and an equal generator give the same token on every rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Sampler", "keep_top_k", "keep_top_p"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """How a token is chosen.

    Args:
        temperature: divides the logits; 0 takes the likeliest token, whatever the filters.
        top_k: only this many of the likeliest tokens can come; 0 is off.
        top_p: only the likeliest tokens that together reach this probability can come; 0 is off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0

    def __call__(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """The chosen token's id.

        Args:
            logits_V: one place's logits over the tokenizer's vocabulary, padding left out.
            generator: a CPU generator; not used when greedy.
        """
        logits_V = logits_V.detach().to("cpu", torch.float32)
        if self.temperature == 0.0:
            return int(logits_V.argmax())
        logits_V = logits_V / self.temperature
        if self.top_k > 0:
            logits_V = keep_top_k(logits_V, self.top_k)
        if self.top_p > 0.0:
            logits_V = keep_top_p(logits_V, self.top_p)
        return int(torch.multinomial(logits_V.softmax(dim=-1), 1, generator=generator))


def keep_top_k(logits_V: Tensor, count: int) -> Tensor:
    """The logits with all but the `count` highest at minus infinity."""
    highest = logits_V.topk(min(count, logits_V.numel()))
    return torch.full_like(logits_V, -torch.inf).scatter(0, highest.indices, highest.values)


def keep_top_p(logits_V: Tensor, mass: float) -> Tensor:
    """The logits with all but the likeliest tokens that together reach `mass` at minus infinity.

    The token that crosses `mass` stays, so at least one does.

    Source: arXiv:1904.09751, section 3.1.
    """
    ordered = logits_V.sort(descending=True, stable=True)
    probabilities = ordered.values.softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    kept = ordered.values.masked_fill(mass_before >= mass, -torch.inf)
    return torch.empty_like(logits_V).scatter(0, ordered.indices, kept)
