"""The widths of heads and of the feed-forward block, and the parameters that they follow from."""

from neox_config.facts.activations import ACTIVATION_FACTS
from neox_config.schema.config import NeoXConfig

__all__ = ["MLP_SIZES", "head_width", "mlp_width"]

MLP_SIZES = ("intermediate_size", "expansion_factor")
"""Parameters of GPT-NeoX from which the width follows, instead of mlp_width."""


def head_width(config: NeoXConfig) -> int:
    """Return the width of a query, key and value of attention."""
    model = config.model
    return model.head_dim or model.hidden_size // model.num_attention_heads


def mlp_width(config: NeoXConfig) -> int:
    """Return the inner width of the feed-forward block."""
    model = config.model
    if model.mlp_width is not None:
        return model.mlp_width
    size = model.intermediate_size
    if model.expansion_factor is not None:
        size = int(model.expansion_factor * model.hidden_size)
    return ACTIVATION_FACTS[model.activation].mlp_width(model.hidden_size, size, model.mlp_multiple_of)
