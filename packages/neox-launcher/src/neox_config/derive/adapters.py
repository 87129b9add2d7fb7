"""What follows from the parameters of low-rank adapters."""

from neox_config.schema.config import NeoXConfig

__all__ = ["base_of_adapters"]


def base_of_adapters(config: NeoXConfig) -> str | None:
    """Return the folder of the checkpoints that adapters are added to; None without adapters."""
    return config.adapters.lora_base if config.adapters.lora_rank else None
