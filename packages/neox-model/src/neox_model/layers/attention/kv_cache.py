"""Keys and values kept while generating, so that each new token costs one token's work.

    with caching(model):
        logits = model(prompt_BS)            # fills the cache
        logits = model(next_token_B1)        # sees the prompt through it

All rows of the batch have the same length. Outside the context the model is as before.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from neox_model.layers.attention.parallel_attention import ParallelAttention
from neox_model.layers.embedding import Embedding

__all__ = ["KeyValueCache", "caching"]

_GROWTH = 128


class KeyValueCache:
    """Keys and values of one attention layer, in memory that grows by steps."""

    def __init__(self) -> None:
        self.length = 0
        self._memory: tuple[Tensor, Tensor] | None = None

    def extend(self, key_SBNK: Tensor, value_SBNK: Tensor) -> tuple[Tensor, Tensor]:
        """Append, and give all keys and values so far."""
        start, self.length = self.length, self.length + key_SBNK.shape[0]
        keys, values = self._room_for(key_SBNK)
        keys[start : self.length] = key_SBNK
        values[start : self.length] = value_SBNK
        return keys[: self.length], values[: self.length]

    def _room_for(self, like: Tensor) -> tuple[Tensor, Tensor]:
        if self._memory is None or len(self._memory[0]) < self.length:
            rows = -(-self.length // _GROWTH) * _GROWTH
            grown = [like.new_empty((rows, *like.shape[1:])) for _ in range(2)]
            for old, new in zip(self._memory or (), grown, strict=False):
                new[: len(old)] = old
            self._memory = (grown[0], grown[1])
        return self._memory


@contextmanager
def caching(model: nn.Module) -> Iterator[None]:
    """Within, each call of the model continues the sequences of the calls before; gradients are off."""
    attentions = [module for module in model.modules() if isinstance(module, ParallelAttention)]
    hooks = [
        module.register_forward_hook(_count_tokens)
        for module in model.modules()
        if isinstance(module, Embedding)
    ]
    for attention in attentions:
        attention.cache = KeyValueCache()
    try:
        with torch.no_grad():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in model.modules():
            if isinstance(module, ParallelAttention):
                module.cache = None
            elif isinstance(module, Embedding):
                module.start = 0


def _count_tokens(embedding: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
    assert isinstance(embedding, Embedding)
    embedding.start += inputs[0].shape[1]
