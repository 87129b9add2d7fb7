"""Build the forms of low-rank adapters from configuration."""

from neox_config import NeoXConfig
from neox_model.parallel.low_rank import LowRank

__all__ = ["build_adapters"]


def build_adapters(config: NeoXConfig) -> dict[str, LowRank]:
    """Return the form of each adapter by the name of its matrix in a layer; empty without adapters."""
    section = config.adapters
    if not section.lora_rank:
        return {}
    form = LowRank(section.lora_rank, section.lora_alpha, section.lora_dropout)
    return dict.fromkeys(section.lora_target_modules, form)
