"""Give every layer of a model a cache, so that each new token costs the work of one token.

caches = KeyValueCaches(model, slots=4, capacity=2048)
with caches.processing(Chunk(first=0, start=0)):
    logits = model(prompts_BS)
with caches.processing(NextTokens(positions_B, spans)):
    logits = model((tokens_B1, positions_B1))
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn

from neox_model.layers.cache import Cached, Chunk, LayerCache, NextTokens, spans_of
from neox_model.layers.positions import lengths_of_requests

__all__ = ["KeyValueCaches", "logits_in_parts"]


class KeyValueCaches:
    """The caches of all layers of a model. Every architecture has one: gMLP stores the inputs of its gate.

    Args:
        model: the model, or a pipeline stage of it.
        slots: number of sequences.
        capacity: tokens of the longest sequence.
    """

    def __init__(self, model: nn.Module, *, slots: int, capacity: int) -> None:
        keepers = [module for module in model.modules() if isinstance(module, Cached)]
        self._caches = [(keeper, LayerCache(slots, capacity)) for keeper in keepers]

    @contextmanager
    def processing(self, window: Chunk | NextTokens) -> Iterator[None]:
        """Within this context, the model processes these tokens; without it, it has no cache."""
        for keeper, cache in self._caches:
            cache.window = window
            keeper.cache = cache
        try:
            yield
        finally:
            for keeper, _ in self._caches:
                keeper.cache = None

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot to another."""
        for _, cache in self._caches:
            cache.move(source, target, length)


def logits_in_parts(model: nn.Module, tokens_BS: Tensor, bounds: Sequence[int]) -> Tensor:
    """Return logits_BSV of tokens that are given in parts, each behind those before it; no gradient.

    Args:
        model: a whole model.
        tokens_BS: token ids.
        bounds: index of the first token of each part, and the number of tokens.
    """
    batch, length = tokens_BS.shape
    caches = KeyValueCaches(model, slots=batch, capacity=length)
    logits, lengths_B = [], torch.full((batch,), length, device=tokens_BS.device)
    for start, stop in pairwise(bounds):
        positions_BS = torch.arange(start, stop, device=tokens_BS.device).expand(batch, -1)
        window: Chunk | NextTokens = Chunk(0, start)
        if stop == start + 1:
            spans = spans_of([start] * batch, positions_BS[:, 0], max_waste=0)
            window = NextTokens(positions_BS[:, 0], spans)
        with torch.no_grad(), caches.processing(window), lengths_of_requests(model, lengths_B):
            logits.append(model((tokens_BS[:, start:stop], positions_BS)))
    return torch.cat(logits, dim=1)
