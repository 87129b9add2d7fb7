"""Cache keys and values during generation, so that each new token costs the work of one token.

    with caching(model):
        logits = model(prompt_BS)            # fills the cache
        logits = model(next_token_B1)        # sees the prompt through it

All rows of the batch have the same length. The context manager restores the model at the end.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from neox_model.layers.attention.parallel_attention import ParallelAttention
from neox_model.layers.embedding import Embedding
from neox_model.layers.gmlp_layer import SpatialGate

__all__ = ["KeyValueCache", "caching"]

_GROWTH = 128


class KeyValueCache:
    """Rows of one attention layer (keys and values), one per token, in memory that grows in steps."""

    def __init__(self) -> None:
        self.length = 0
        self._memory: tuple[Tensor, ...] = ()

    def extend(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Append rows to each cached tensor, and return all rows."""
        start, self.length = self.length, self.length + len(rows[0])
        self._make_room(rows)
        for memory, new in zip(self._memory, rows, strict=True):
            memory[start : self.length] = new
        return tuple(memory[: self.length] for memory in self._memory)

    def _make_room(self, like: tuple[Tensor, ...]) -> None:
        if self._memory and len(self._memory[0]) >= self.length:
            return
        count = -(-self.length // _GROWTH) * _GROWTH
        grown = tuple(row.new_empty((count, *row.shape[1:])) for row in like)
        for old, new in zip(self._memory, grown, strict=False):
            new[: len(old)] = old
        self._memory = grown


@contextmanager
def caching(model: nn.Module) -> Iterator[None]:
    """Within this context, each call continues the sequences of earlier calls; gradients are disabled."""
    keepers = [module for module in model.modules() if isinstance(module, ParallelAttention | SpatialGate)]
    embeddings = [module for module in model.modules() if isinstance(module, Embedding)]
    hooks = [embedding.register_forward_hook(_count_tokens) for embedding in embeddings]
    for keeper in keepers:
        keeper.cache = KeyValueCache()
    try:
        with torch.no_grad():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for keeper in keepers:
            keeper.cache = None
        for embedding in embeddings:
            embedding.start = 0


def _count_tokens(embedding: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
    assert isinstance(embedding, Embedding)
    embedding.start += inputs[0].shape[1]
