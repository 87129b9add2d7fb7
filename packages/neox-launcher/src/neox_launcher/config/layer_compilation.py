"""What keeps torch.compile away from a configuration's layers, whatever the device."""

from neox_launcher.config.curricula import curricula_of_lengths
from neox_launcher.config.schema import NeoXConfig

__all__ = ["why_layers_stay_uncompiled"]

_SHARDED = 3


def why_layers_stay_uncompiled(config: NeoXConfig) -> str | None:
    """The settings with which layers are not compiled, and why; None: they can be."""
    reasons = {
        "ZeRO stage 3, whose layers fetch and drop their weights while they run": (
            config.zero.zero_optimization.stage == _SHARDED
        ),
        "a curriculum of lengths: every length would be compiled anew": bool(curricula_of_lengths(config)),
        "random_ltd: every number of kept tokens would be compiled anew": _drops_tokens(config),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def _drops_tokens(config: NeoXConfig) -> bool:
    efficiency = config.data_efficiency.data_efficiency
    routing = efficiency.data_routing
    return efficiency.enabled and routing.enabled and routing.random_ltd.enabled
