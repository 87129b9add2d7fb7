"""Values in effect of the optimizer's arguments that differ from the declared parameters."""

from typing import Any

from neox_config.facts.optimizers import OPTIMIZER_FACTS, OptimizerFacts
from neox_config.schema.config import NeoXConfig
from neox_config.schema.sections.optimizer import OptimizerParams

__all__ = ["optimizer_facts", "own_arguments", "refused_parameters"]


def optimizer_facts(config: NeoXConfig) -> OptimizerFacts:
    """Return the properties of the configured optimizer; of an unknown one only the name."""
    optimizer = config.optimizer.optimizer
    return OPTIMIZER_FACTS.get(optimizer.kind, OptimizerFacts(name=optimizer.type))


def own_arguments(config: NeoXConfig) -> dict[str, Any]:
    """Return the values of the arguments whose names or defaults are the optimizer's own."""
    return optimizer_facts(config).arguments_in_effect(config.optimizer.optimizer.params.given())


def refused_parameters(config: NeoXConfig) -> set[str]:
    """Return the declared parameters that the optimizer refuses: torch.optim's take none but these two."""
    facts = optimizer_facts(config)
    return set(OptimizerParams.model_fields) - {"lr", "weight_decay"} if facts.is_of_torch else set()
