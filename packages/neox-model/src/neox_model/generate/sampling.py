"""Sample the next token from logits.

The filters are applied in GPT-NeoX's order: temperature, top_k, top_p. Everything is computed on the CPU in
float32, so that equal logits and generators give the same token on every rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Sampler", "keep_top_k", "keep_top_p"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Samples a token.

    Args:
        temperature: divides the logits; 0 selects the most likely token and ignores the filters.
        top_k: sample from this many most likely tokens; 0 disables the filter.
        top_p: sample from the most likely tokens with this cumulative probability; 0 disables the filter.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0

    def __call__(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """Return the id of the sampled token.

        Args:
            logits_V: logits of one position over the tokenizer's vocabulary, without padding.
            generator: a CPU generator; not used at temperature 0.
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
    """Return the logits with all but the `count` highest set to minus infinity."""
    highest = logits_V.topk(min(count, logits_V.numel()))
    return torch.full_like(logits_V, -torch.inf).scatter(0, highest.indices, highest.values)


def keep_top_p(logits_V: Tensor, mass: float) -> Tensor:
    """Return the logits with all but the most likely tokens, up to probability `mass`, at minus infinity.

    The token that crosses `mass` is kept, so at least one token remains.

    Source: arXiv:1904.09751, section 3.1.
    """
    ordered = logits_V.sort(descending=True, stable=True)
    probabilities = ordered.values.softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    kept = ordered.values.masked_fill(mass_before >= mass, -torch.inf)
    return torch.empty_like(logits_V).scatter(0, ordered.indices, kept)
