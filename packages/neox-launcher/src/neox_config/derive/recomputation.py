"""What the backward pass computes again instead of keeping it."""

from neox_config.derive.pipeline import splits_backward
from neox_config.extras.compression.matrices import compresses
from neox_config.facts.activations import ACTIVATION_FACTS
from neox_config.schema.config import NeoXConfig

__all__ = [
    "gathers_inputs_again",
    "recomputes_attention",
    "recomputes_gated_product",
    "recomputes_layers",
]


def recomputes_layers(config: NeoXConfig) -> bool:
    """Return True if layers are recomputed from their input."""
    section = config.activation_checkpointing
    return section.checkpoint_activations and section.checkpoint_granularity == "full"


def recomputes_attention(config: NeoXConfig) -> bool:
    """Return True if attention alone is recomputed, from queries, keys and values."""
    section = config.activation_checkpointing
    return section.checkpoint_activations and section.checkpoint_granularity == "selective"


def recomputes_gated_product(config: NeoXConfig, *, is_fused: bool) -> bool:
    """Return True if the product of up and gate is computed again.

    Args:
        config: the configuration.
        is_fused: the fused kernel computes it.
    """
    adapters = config.adapters
    keeps_input = compresses(config) or (adapters.lora_rank > 0 and "down" in adapters.lora_target_modules)
    if keeps_input or not ACTIVATION_FACTS[config.model.activation].is_gated:
        return False
    requested = config.activation_checkpointing.recompute_gated_product
    if requested != "auto":
        return requested
    # A schedule that splits the backward pass would compute it in both parts.
    return is_fused and not recomputes_layers(config) and not splits_backward(config)


def gathers_inputs_again(config: NeoXConfig) -> bool:
    """Return True if sequence parallelism gathers the inputs of split matrices again for the backward pass.

    Recomputed layers gather them anyway. A schedule that splits the backward pass would gather them in both.
    Quantized activations are others than those that are gathered.
    """
    quantization = config.compression.compression_training.activation_quantization
    is_quantized = quantization.shared_parameters.enabled
    keeps_them = recomputes_layers(config) or splits_backward(config) or is_quantized
    return config.parallelism.sequence_parallel and not keeps_them
