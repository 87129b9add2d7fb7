"""What the backward pass computes again instead of keeping it."""

from neox_config.schema.config import NeoXConfig

__all__ = ["recomputes_attention", "recomputes_layers"]


def recomputes_layers(config: NeoXConfig) -> bool:
    """Return True if layers are recomputed from their input."""
    section = config.activation_checkpointing
    return section.checkpoint_activations and section.checkpoint_granularity == "full"


def recomputes_attention(config: NeoXConfig) -> bool:
    """Return True if attention alone is recomputed, from queries, keys and values."""
    section = config.activation_checkpointing
    return section.checkpoint_activations and section.checkpoint_granularity == "selective"
