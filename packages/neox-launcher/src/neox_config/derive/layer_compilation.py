"""Settings under which layers cannot be compiled with torch.compile on any device."""

from neox_config.derive.experts import balances_batch
from neox_config.derive.objective import is_retrieval
from neox_config.derive.pipeline import splits_backward
from neox_config.derive.recomputation import recomputes_gated_product
from neox_config.extras.compression.matrices import compresses
from neox_config.extras.data_efficiency.curricula import curricula_of_lengths
from neox_config.schema.config import NeoXConfig

__all__ = ["UNCOMPILED_STAGE", "drops_tokens", "why_layers_stay_uncompiled"]

# The ZeRO stage without compiled layers.
UNCOMPILED_STAGE = 3


def why_layers_stay_uncompiled(config: NeoXConfig, *, zero_stage: int | None = None) -> str | None:
    """Return the setting that prevents compilation and the reason, or None if layers can be compiled.

    Args:
        config: the configuration.
        zero_stage: used instead of its ZeRO stage.
    """
    stage = config.zero.zero_optimization.stage if zero_stage is None else zero_stage
    schedule = config.parallelism.pipeline_schedule
    reasons = {
        f"pipeline_schedule: {schedule}, which computes the gradients of weights apart from those of "
        "activations": splits_backward(config),
        "ZeRO stage 3, whose layers gather and release their weights while they run": (
            stage == UNCOMPILED_STAGE
        ),
        "moe_balance_over: batch, because a backward pass exchanges the counts of tokens": (
            balances_batch(config)
        ),
        "objective: ict, because layers of two towers are not tried together": is_retrieval(config),
        "a curriculum of lengths, because layers would be recompiled for every length": bool(
            curricula_of_lengths(config.data_efficiency)
        ),
        "random_ltd, because layers would be recompiled for every number of kept tokens": (
            drops_tokens(config)
        ),
        "recompute_gated_product: true, because compiled layers store the product": (
            recomputes_gated_product(config, is_fused=False)
        ),
        "compression_training, whose matrices change while they are trained": compresses(config),
        "eigenvalue.enabled, because compiled layers have no second derivatives": (
            config.engine.eigenvalue.enabled
        ),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def drops_tokens(config: NeoXConfig) -> bool:
    """Return True if some layers process a part of the tokens in training."""
    efficiency = config.data_efficiency.data_efficiency
    routing = efficiency.data_routing
    return efficiency.enabled and routing.enabled and routing.random_ltd.enabled
