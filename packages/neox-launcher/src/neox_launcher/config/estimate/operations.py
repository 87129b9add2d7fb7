"""Operations: two per multiply-add, attention not halved for causality.

Source: arXiv:2104.04473.
"""

from collections import Counter

from neox_launcher.config.estimate.parameters import layer_weights
from neox_launcher.config.shapes import Shape

__all__ = ["flops_per_token", "keys_per_query"]


def flops_per_token(shape: Shape, *, is_recomputed: bool = False) -> int:
    """Of forward and backward pass; recomputing the layers adds their forward pass once more.

    Source: arXiv:2104.04473, appendix: 72 (96) B s l h^2 (1 + s / 6h + V / 16lh), here for any layer.
    """
    kinds = Counter(shape.attention_types)
    layers = sum(number * _layer_flops(shape, kind) for kind, number in kinds.items())
    head = 2 * shape.vocab_size * shape.hidden_size
    return 3 * (layers + head) + (layers if is_recomputed else 0)


def _layer_flops(shape: Shape, kind: str) -> int:
    """Of one token's forward pass through one layer."""
    matrices = 2 * sum(tensor.numbers for tensor in layer_weights(shape, kind) if tensor.multiplies)
    if kind in ("gmlp", "amlp"):
        mixed = 8 * shape.seq_length * shape.hidden_size
        attended = (shape.gmlp_attention_width or 0) if kind == "amlp" else 0
        return matrices + mixed + 4 * shape.seq_length * attended
    return matrices + 4 * keys_per_query(shape, kind) * shape.hidden_size


def keys_per_query(shape: Shape, kind: str) -> int:
    """Keys that a query is multiplied with; causality halves none of them."""
    length, sparsity = shape.seq_length, shape.sparsity
    windows = length / (sparsity.block * sparsity.local_blocks)
    blocks = {
        "global": length / sparsity.block,
        "local": sparsity.local_attention_blocks // 2 + 1,
        "sparse_fixed": sparsity.local_blocks + windows * sparsity.global_blocks,
        "sparse_variable": sparsity.variable_window + sparsity.listed_global_blocks + sparsity.random_blocks,
        "bigbird": sparsity.sliding_blocks + sparsity.global_blocks + sparsity.random_blocks,
        "bslongformer": sparsity.sliding_blocks + sparsity.listed_global_blocks,
    }
    return min(length, round(blocks[kind] * sparsity.block))
