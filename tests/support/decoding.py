"""Run models with caches: the parts of a sequence one after the other, and batches of prompts."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from neox_model.generate.batch import Admission, Batch, NewTokens
from neox_model.generate.forward import Forward
from neox_model.generate.sampling import Sampling
from neox_model.layers.attention.kv_cache import KeyValueCaches
from neox_model.layers.cache import Chunk, NextTokens, spans_of

__all__ = ["continue_prompts", "logits_in_parts"]


def logits_in_parts(model: nn.Module, tokens_BS: Tensor, bounds: Sequence[int]) -> Tensor:
    """Return logits_BSV of tokens that are given in parts, each behind those before it.

    Args:
        model: a whole model.
        tokens_BS: token ids.
        bounds: first token of each part, and the number of tokens.
    """
    batch, length = tokens_BS.shape
    caches = KeyValueCaches(model, slots=batch, capacity=length)
    logits = []
    for start, stop in pairwise(bounds):
        positions_BS = torch.arange(start, stop).expand(batch, -1)
        window: Chunk | NextTokens = Chunk(0, start)
        if stop == start + 1:
            spans = spans_of([start] * batch, positions_BS[:, 0], max_waste=0)
            window = NextTokens(positions_BS[:, 0], spans)
        with torch.no_grad(), caches.processing(window):
            logits.append(model((tokens_BS[:, start:stop], positions_BS)))
    return torch.cat(logits, dim=1)


def continue_prompts(
    forward: Forward,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    *,
    count: int,
    recompute: bool = False,
    together: bool = True,
) -> list[NewTokens]:
    """Return `count` tokens for every prompt, decoded together or one by one."""
    if not together:
        return [
            continue_prompts(forward, [prompt], [sampling], count=count, recompute=recompute)[0]
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
    capacity = max(map(len, prompts)) + count
    batch = Batch(forward, slots=len(prompts), capacity=capacity, recompute=recompute)
    pairs = zip(prompts, samplings, strict=True)
    places = batch.admit([Admission(prompt, sampling, count) for prompt, sampling in pairs])
    for _ in range(count - 1):
        batch.step()
    found = batch.read()
    return [found[place] for place in places]
