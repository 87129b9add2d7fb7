"""Floating-point operations: two per multiply-add. Attention is counted by one of two conventions.

- full: as if every token saw the whole sequence. Source: arXiv:2204.02311, appendix B; arXiv:2104.04473.
- causal: without what the causal mask hides, which is half of it, as Megatron-LM counts today.

Both are equal for models whose tokens see later ones.
"""

from neox_config.estimate.mixers import Convention, core_operations, costs_of
from neox_config.estimate.parameters import layer_weights, number_of_each
from neox_config.spec.model import ModelSpec, Retrieval

__all__ = ["Convention", "flops_per_token"]


def flops_per_token(
    model: ModelSpec,
    *,
    entries: int,
    length: int,
    convention: Convention = "full",
    is_recomputed: bool = False,
    recomputes_attention: bool = False,
) -> int:
    """Return the operations of forward and backward pass per token.

    Recomputation adds another forward pass, of the layers or of attention between its projections.

    Source: arXiv:2104.04473, appendix: 72 (96) B s l h^2 (1 + s / 6h + V / 16lh), here for any layer.

    Args:
        model: the model.
        entries: number of entries of the vocabulary, including padding.
        length: tokens of a sample.
        convention: how attention is counted.
        is_recomputed: True if layers are recomputed.
        recomputes_attention: True if attention alone is.
    """
    layers = attention = 0
    for layer, number in number_of_each(model, range(len(model.layers))):
        core = core_operations(layer, model, length, convention)
        multiplied = sum(tensor.used for tensor in layer_weights(model, layer) if tensor.multiplies)
        layers += number * (2 * multiplied + core)
        if any(cost.scores for _, cost in costs_of(layer)):
            attention += number * core
    head = 2 * entries * model.width
    if isinstance(model.head, Retrieval):
        # Each token of a sample is one of the query and one of the block; one token of each is embedded.
        layers, head = model.texts * layers, 0
    again = attention if recomputes_attention else layers if is_recomputed else 0
    return 3 * (layers + head) + again
