"""What follows from the parameters of low-rank adapters."""

from neox_config.facts.activations import ACTIVATION_FACTS
from neox_config.facts.adapters import ADAPTED
from neox_config.schema.config import NeoXConfig

__all__ = ["adapted_matrices", "base_of_adapters"]


def adapted_matrices(config: NeoXConfig) -> list[str]:
    """Return the matrices of the model with an adapter, each once, in one order; none without adapters."""
    targets = config.adapters.lora_target_modules if config.adapters.lora_rank else ()
    has_gate = ACTIVATION_FACTS[config.model.activation].is_gated
    return [name for name in ADAPTED if name in targets and (has_gate or name != "gate")]


def base_of_adapters(config: NeoXConfig) -> str | None:
    """Return the folder of the checkpoints that adapters are added to; None without adapters."""
    return config.adapters.lora_base if config.adapters.lora_rank else None
