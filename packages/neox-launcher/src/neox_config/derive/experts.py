"""What follows from the parameters of experts."""

from neox_config.derive.widths import mlp_width
from neox_config.schema.config import NeoXConfig

__all__ = [
    "balances_batch",
    "expert_layers",
    "expert_ranks",
    "expert_scores",
    "expert_width",
    "has_experts",
    "inner_widths",
]

_MULTIPLE = 256


def has_experts(config: NeoXConfig) -> bool:
    """Return True if some layers have experts."""
    return config.experts.moe_num_experts > 1


def expert_ranks(config: NeoXConfig) -> int:
    """Return the number of data-parallel ranks that divide the experts; 1 without experts."""
    return config.parallelism.expert_parallel_size if has_experts(config) else 1


def balances_batch(config: NeoXConfig) -> bool:
    """Return True if experts are balanced over the micro-batches of all data-parallel ranks together."""
    given = config.experts
    return has_experts(config) and given.moe_balance_loss > 0 and given.moe_balance_over == "batch"


def expert_layers(config: NeoXConfig) -> frozenset[int]:
    """Return the numbers of the layers with experts."""
    given = config.experts
    if not has_experts(config):
        return frozenset()
    if given.moe_layers is not None:
        return frozenset(given.moe_layers)
    return frozenset(range(0, config.model.num_layers, given.moe_expert_interval))


def expert_width(config: NeoXConfig) -> int:
    """Return the inner width of an expert.

    Source: GPT-NeoX, in which intermediate_size is the width itself, also with a gated activation.
    """
    given = config.experts.moe_expert_width or config.model.intermediate_size
    return given or -(-4 * config.model.hidden_size // _MULTIPLE) * _MULTIPLE


def inner_widths(config: NeoXConfig) -> dict[str, int]:
    """Return the inner widths of the feed-forward blocks that layers have, by parameter."""
    layers, shared = expert_layers(config), config.experts.moe_shared_width
    dense = {"mlp_width": mlp_width(config)} if len(layers) < config.model.num_layers else {}
    experts = {"moe_expert_width": expert_width(config)} | ({"moe_shared_width": shared} if shared else {})
    return dense | (experts if layers else {})


def expert_scores(config: NeoXConfig) -> str:
    """Return the function of the router's logits."""
    given = config.experts
    if given.moe_scores != "auto":
        return given.moe_scores
    return "sigmoid" if given.moe_router_type == "sinkhorn" and given.moe_top_k == 1 else "softmax"
