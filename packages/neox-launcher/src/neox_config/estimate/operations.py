"""Floating-point operations: two per multiply-add; attention is not halved for the causal mask.

Source: arXiv:2104.04473.
"""

from collections import Counter

from neox_config.estimate.parameters import layer_weights
from neox_config.estimate.shapes import Shape
from neox_config.facts.attention import ATTENTION_FACTS

__all__ = ["flops_per_token", "keys_per_query"]


def flops_per_token(shape: Shape, *, is_recomputed: bool = False, recomputes_attention: bool = False) -> int:
    """Return the operations of forward and backward pass per token.

    Recomputation adds another forward pass, of the layers or of attention between its projections.

    Source: arXiv:2104.04473, appendix: 72 (96) B s l h^2 (1 + s / 6h + V / 16lh), here for any layer.
    """
    kinds = Counter(shape.attention_types)
    layers = sum(number * _layer_flops(shape, kind) for kind, number in kinds.items())
    head = 2 * shape.vocab_size * shape.hidden_size
    if shape.embedding_size is not None:
        # Each token of a sample is one of the query and one of the block; one token of each is embedded.
        layers, head = shape.texts * layers, 0
    again = layers if is_recomputed else 0
    if recomputes_attention:
        again = sum(number * _attention_flops(shape, kind) for kind, number in kinds.items())
    return 3 * (layers + head) + again


def _layer_flops(shape: Shape, kind: str) -> int:
    """Return the operations of the forward pass of one token through one layer."""
    matrices = 2 * sum(tensor.numbers for tensor in layer_weights(shape, kind) if tensor.multiplies)
    if ATTENTION_FACTS[kind].is_gmlp:
        mixed = 8 * shape.seq_length * shape.hidden_size
        attended = (shape.gmlp_attention_width or 0) if ATTENTION_FACTS[kind].has_inner_attention else 0
        return matrices + mixed + 4 * shape.seq_length * attended
    return matrices + _attention_flops(shape, kind)


def _attention_flops(shape: Shape, kind: str) -> int:
    """Return the operations of one token in attention over heads, without its projections."""
    return 0 if ATTENTION_FACTS[kind].is_gmlp else 4 * keys_per_query(shape, kind) * shape.hidden_size


def keys_per_query(shape: Shape, kind: str) -> int:
    """Return the number of keys that a query is multiplied with, not halved for the causal mask."""
    blocks_per_query = ATTENTION_FACTS[kind].blocks_per_query
    assert blocks_per_query is not None, f"{kind} layers have no attention over heads"
    length, block = shape.seq_length, shape.sparsity.block
    return min(length, round(blocks_per_query(shape.sparsity, length / block) * block))
