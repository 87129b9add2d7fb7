"""Floating-point operations: two per multiply-add. Attention is counted by one of two conventions.

- full: as if every token saw the whole sequence. Source: arXiv:2204.02311, appendix B; arXiv:2104.04473.
- causal: without what the causal mask hides, which is half of it, as Megatron-LM counts today.

Both are equal for models whose tokens see later ones.
"""

from collections import Counter
from typing import Literal

from neox_config.estimate.parameters import layer_weights
from neox_config.estimate.shapes import Shape
from neox_config.facts.attention import ATTENTION_FACTS

__all__ = ["Convention", "flops_per_token", "keys_per_query"]

Convention = Literal["full", "causal"]


def flops_per_token(
    shape: Shape,
    *,
    convention: Convention = "full",
    is_recomputed: bool = False,
    recomputes_attention: bool = False,
) -> int:
    """Return the operations of forward and backward pass per token.

    Recomputation adds another forward pass, of the layers or of attention between its projections.

    Source: arXiv:2104.04473, appendix: 72 (96) B s l h^2 (1 + s / 6h + V / 16lh), here for any layer.
    """
    kinds = Counter(shape.attention_types)
    layers = sum(number * _layer_flops(shape, kind, convention) for kind, number in kinds.items())
    head = 2 * shape.vocab_size * shape.hidden_size
    if shape.embedding_size is not None:
        # Each token of a sample is one of the query and one of the block; one token of each is embedded.
        layers, head = shape.texts * layers, 0
    again = layers if is_recomputed else 0
    if recomputes_attention:
        again = sum(number * _attention_flops(shape, kind, convention) for kind, number in kinds.items())
    return 3 * (layers + head) + again


def _layer_flops(shape: Shape, kind: str, convention: Convention) -> int:
    """Return the operations of the forward pass of one token through one layer."""
    matrices = 2 * sum(tensor.numbers for tensor in layer_weights(shape, kind) if tensor.multiplies)
    if ATTENTION_FACTS[kind].is_gmlp:
        attended = (shape.gmlp_attention_width or 0) if ATTENTION_FACTS[kind].has_inner_attention else 0
        positions = _counted(shape, shape.seq_length, convention)
        return matrices + round(4 * positions * (2 * shape.hidden_size + attended))
    return matrices + _attention_flops(shape, kind, convention)


def _attention_flops(shape: Shape, kind: str, convention: Convention) -> int:
    """Return the operations of one token in attention over heads, without its projections."""
    if ATTENTION_FACTS[kind].is_gmlp:
        return 0
    return round(4 * _counted(shape, keys_per_query(shape, kind), convention) * shape.hidden_size)


def keys_per_query(shape: Shape, kind: str) -> int:
    """Return the number of keys that a query is multiplied with, not halved for the causal mask."""
    blocks_per_query = ATTENTION_FACTS[kind].blocks_per_query
    assert blocks_per_query is not None, f"{kind} layers have no attention over heads"
    length, block = shape.seq_length, shape.sparsity.block
    return min(length, round(blocks_per_query(shape.sparsity, length / block) * block))


def _counted(shape: Shape, keys: int, convention: Convention) -> float:
    """Return how many of the keys of a query are counted, as a mean over the sequence.

    The first queries of a causal sequence see less than a window: of a window as long as the sequence, half.
    """
    if convention == "full" or not shape.sparsity.is_causal:
        return keys
    return keys - keys**2 / (2 * shape.seq_length)
