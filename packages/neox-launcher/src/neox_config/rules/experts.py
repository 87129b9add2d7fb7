"""Rules about experts."""

from collections.abc import Iterator

from neox_config.derive.attention_layers import types_in
from neox_config.derive.engine import chosen_engine
from neox_config.derive.experts import expert_layers, has_experts
from neox_config.derive.layer_compilation import drops_tokens
from neox_config.derive.objective import is_retrieval
from neox_config.facts.attention import GMLP_TYPES
from neox_config.facts.optimizers import OPTIMIZER_FACTS
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig


def experts_run_where_they_are_built(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse what layers with experts do not have."""
    if not has_experts(c):
        return
    engine, facts = chosen_engine(c), OPTIMIZER_FACTS.get(c.optimizer.optimizer.kind)
    refused = {
        "engine": (
            engine.name == "deepspeed",
            f"is deepspeed ({engine.reason}), which does not sum the gradients of routers",
            "set engine: torch, and remove what requires DeepSpeed",
        ),
        "optimizer.type": (
            facts is not None and bool(facts.replica_states or facts.other_shapes),
            "stores numbers for rows and columns of matrices, which the tensors of experts are not"
            if facts is not None and facts.other_shapes
            else "averages momenta with one bit per element, which is not supported with experts",
            "use Adam or Muon, or set moe-num-experts: 1",
        ),
        "expert_parallel_size": (
            c.parallelism.expert_parallel_size > 1 and facts is not None and facts.requires_whole_weights,
            f"does not work with {c.optimizer.optimizer.kind}, which requires norms of whole weights",
            "set it to 1, or use another optimizer",
        ),
        "use_mup": (
            c.mup.use_mup,
            "has no rule for the widths of experts and routers",
            "set it to false, or moe-num-experts: 1",
        ),
        "data_efficiency.data_routing.random_ltd.enabled": (
            drops_tokens(c),
            "leaves tokens out of layers, whose experts would be balanced over the others alone",
            "set it to false, or moe-num-experts: 1",
        ),
        "objective": (
            is_retrieval(c),
            "is ict, whose two towers are not supported with experts",
            "use another objective, or set moe-num-experts: 1",
        ),
        "num_unique_layers": (
            c.model.num_unique_layers is not None,
            "is not supported with experts, whose tokens are counted for each layer",
            "remove it, or set moe-num-experts: 1",
        ),
        "attention_config": (
            bool(types_in(c) & set(GMLP_TYPES)),
            "has gmlp or amlp layers, which have no place for experts",
            "use another attention type, or set moe-num-experts: 1",
        ),
        "eigenvalue.enabled": (
            c.engine.eigenvalue.enabled,
            "requires second derivatives, which the balance of experts does not have",
            "set it to false, or moe-num-experts: 1",
        ),
    }
    for name, (is_so, what, remedy) in refused.items():
        if is_so:
            yield Problem(name, what, remedy)


def a_token_has_at_most_all_experts(c: NeoXConfig) -> Iterator[Problem]:
    """Require no more experts per token than a layer has."""
    given = c.experts
    if has_experts(c) and given.moe_top_k > given.moe_num_experts:
        what = f"is more than moe-num-experts: {given.moe_num_experts}"
        yield Problem("moe_top_k", what, "set it to at most that")


def ranks_have_equally_many_experts(c: NeoXConfig) -> Iterator[Problem]:
    """Require a number of experts that expert-parallel ranks divide evenly."""
    size, number = c.parallelism.expert_parallel_size, c.experts.moe_num_experts
    if has_experts(c) and number % size:
        what = f"does not divide moe-num-experts: {number}"
        yield Problem("expert_parallel_size", what, "use a divisor of it")


def experts_are_in_layers(c: NeoXConfig) -> Iterator[Problem]:
    """Require different numbers of layers, and at least one."""
    layers = c.experts.moe_layers
    if not has_experts(c) or layers is None:
        return
    if sorted(expert_layers(c)) != list(layers) or not layers or layers[-1] >= c.model.num_layers:
        what = "must be different numbers in ascending order, at least one, and below num-layers"
        yield Problem("moe_layers", what, f"use some of 0 to {c.model.num_layers - 1}")


def groups_have_the_experts_of_a_token(c: NeoXConfig) -> Iterator[Problem]:
    """Require equal groups of two experts or more, of which those that are chosen have enough experts."""
    given = c.experts
    if not has_experts(c) or given.moe_groups == 1:
        return
    size, rest = divmod(given.moe_num_experts, given.moe_groups)
    if rest or size < 2:
        what = f"must divide moe-num-experts: {given.moe_num_experts} into groups of two experts or more"
        yield Problem("moe_groups", what, "set it to such a number, or remove it")
    elif not -(-given.moe_top_k // size) <= given.moe_top_groups <= given.moe_groups:
        what = (
            f"must be at most moe-groups: {given.moe_groups}, and have moe-top-k: {given.moe_top_k} experts"
        )
        yield Problem(
            "moe_top_groups", what, f"use some of {-(-given.moe_top_k // size)} to {given.moe_groups}"
        )


def experts_are_balanced_in_one_way(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse to balance the scores of experts that sinkhorn chooses, and a bias on scores of both signs."""
    given = c.experts
    if not has_experts(c) or given.moe_router_type == "topk":
        return
    asked = {
        "moe_balance_loss": given.moe_balance_loss > 0,
        "moe_expert_bias": given.moe_expert_bias,
        "moe_jitter_eps": given.moe_jitter_eps is not None,
        "moe_groups": given.moe_groups > 1,
    }
    for name, is_asked in asked.items():
        if is_asked:
            what = "requires moe-router-type: topk; sinkhorn balances experts by itself"
            yield Problem(name, what, "set moe-router-type: topk, or remove it")
