"""Rules about the optimizer."""

from collections.abc import Iterator

from neox_config.derive.engine import chosen_engine, engine_offers
from neox_config.derive.learning_rate import peak_instead_of_lr, peak_rate
from neox_config.derive.optimizer_arguments import optimizer_facts
from neox_config.facts.optimizers import ARGUMENT_LIMITS, OPTIMIZER_FACTS
from neox_config.problems import Problem, did_you_mean
from neox_config.schema.config import NeoXConfig


def the_optimizer_is_known(c: NeoXConfig) -> Iterator[Problem]:
    """Require a known optimizer: one of this project, of DeepSpeed or of torch.optim."""
    optimizer = c.optimizer.optimizer
    if optimizer.kind not in OPTIMIZER_FACTS:
        names = [facts.name for facts in OPTIMIZER_FACTS.values()]
        near = did_you_mean(optimizer.type, names)
        yield Problem("optimizer.type", "is not a known optimizer", near or f"use {', '.join(names)}")


def optimizers_know_their_arguments(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse arguments that the optimizer does not take."""
    facts = OPTIMIZER_FACTS.get(c.optimizer.optimizer.kind)
    if facts is None:
        return
    params = c.optimizer.optimizer.params
    declared = ("lr", "weight_decay") if facts.is_of_torch else tuple(type(params).model_fields)
    known = (*declared, *facts.arguments)
    for name in params.given():
        if name in facts.refused:
            yield Problem(f"optimizer.params.{name}", facts.refused[name], "remove it")
        elif name not in known:
            others = f"remove it, or use {', '.join(facts.arguments)}" if facts.is_of_torch else ""
            remedy = did_you_mean(name, known, cutoff=0.6) or others or "check its spelling"
            yield Problem(f"optimizer.params.{name}", f"is not an argument of {facts.name}", remedy)


def arguments_are_within_their_limits(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse values of our optimizers' undeclared arguments that have no meaning; torch checks its own."""
    optimizer = c.optimizer.optimizer
    facts = OPTIMIZER_FACTS.get(optimizer.kind)
    if facts is None or facts.is_of_torch:
        return
    given = optimizer.params.given()
    for name in facts.arguments:
        limit = ARGUMENT_LIMITS.get(name)
        if limit is not None and name in given and not limit.holds(given[name]):
            yield Problem(f"optimizer.params.{name}", f"must be {limit.what}", f"use {limit.example}")


def betas_are_below_one(c: NeoXConfig) -> Iterator[Problem]:
    """Require Adam betas in [0, 1)."""
    betas = c.optimizer.optimizer.params.betas
    if not all(0 <= beta < 1 for beta in betas):
        yield Problem(
            "optimizer.params.betas",
            "must be two numbers, each at least 0 and less than 1",
            "use [0.9, 0.95]",
        )


def the_trust_ratio_has_a_range(c: NeoXConfig) -> Iterator[Problem]:
    """Require the minimum trust ratio of Lamb and OneBitLamb to be at most the maximum."""
    params = c.optimizer.optimizer.params
    if c.optimizer.optimizer.kind in ("lamb", "onebitlamb") and params.min_coeff > params.max_coeff:
        yield Problem(
            "optimizer.params.min_coeff",
            f"is more than max_coeff: {params.max_coeff:g}",
            "set a smaller min_coeff, or a larger max_coeff",
        )


def the_factor_of_the_trust_ratio_has_a_range(c: NeoXConfig) -> Iterator[Problem]:
    """Require the range of OneBitLamb's factor to contain 1, with which it begins."""
    params = c.optimizer.optimizer.params
    if c.optimizer.optimizer.kind == "onebitlamb" and not params.factor_min <= 1 <= params.factor_max:
        yield Problem(
            "optimizer.params.factor_min",
            f"and factor_max: {params.factor_max:g} are a range without 1, with which the factor begins",
            "set factor_min to at most 1 and factor_max to at least 1",
        )


def a_second_learning_rate_is_relative_to_the_first(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse adam_lr of Muon without a learning rate that the schedule changes."""
    optimizer = c.optimizer.optimizer
    is_given = optimizer.params.given().get("adam_lr") is not None
    if optimizer.kind == "muon" and is_given and peak_rate(c) == 0:
        yield Problem(
            "optimizer.params.adam_lr",
            f"follows the schedule in proportion to its largest learning rate "
            f"({peak_instead_of_lr(c) or 'optimizer.params.lr'}), which is 0",
            "set that to more than 0, or remove adam_lr",
        )


def averaged_weights_are_the_same_on_all_replicas(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse averages of weights with optimizers whose replicas have different weights for a while."""
    facts = optimizer_facts(c)
    if c.optimizer.ema_decay is not None and facts.local_states:
        what = f"averages weights that all replicas have, and those of {facts.name} take steps alone"
        yield Problem("ema_decay", what, "remove it, or use Adam")


def states_are_rounded_by_their_place(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse states in bfloat16 where the optimizer, or the engine, does not store them so."""
    optimizer = c.optimizer.optimizer
    facts = OPTIMIZER_FACTS.get(optimizer.kind)
    if optimizer.params.state_dtype == "fp32" or facts is None or facts.is_of_torch:
        return
    if "state_dtype" not in facts.declared:
        what = f"is not implemented for {facts.name}, which stores its states in float32"
        yield Problem("optimizer.params.state_dtype", what, "remove it, or use Adam")
    elif not engine_offers(c, "whole_rows"):
        yield Problem(
            "optimizer.params.state_dtype",
            "rounds a state by its place in the weight, but DeepSpeed's ZeRO updates flat parts of weights",
            "remove it, or set engine: torch, or zero_optimization.stage: 0",
        )


def zero_cuts_weights_for_elementwise_optimizers_only(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse ZeRO with optimizers that need whole weights, unless it divides rows and they join them."""
    facts = optimizer_facts(c)
    if facts.is_elementwise or facts.replica_states:
        return
    if facts.gathers_rows is not None and not engine_offers(c, "whole_rows"):
        engine = chosen_engine(c)
        yield Problem(
            "optimizer.type",
            "needs whole weights for its update, but DeepSpeed's ZeRO updates flat parts of them "
            f"(the engine is {engine.name}: {engine.reason}); zero_allow_untested_optimizer does not change "
            "that",
            "remove what requires DeepSpeed, so that the torch engine trains, or set "
            "zero_optimization.stage: 0, or use Adam",
        )
    elif facts.gathers_rows is None and not engine_offers(c, "whole_weights"):
        yield Problem(
            "optimizer.type",
            "needs whole weights for its update, but ZeRO partitions weights; "
            "zero_allow_untested_optimizer does not change that",
            "set zero_optimization.stage: 0, or use Adam",
        )


def tensor_parallelism_splits_weights_for_elementwise_optimizers_only(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse tensor parallelism with optimizers that need whole weights, because it splits them."""
    facts, size = optimizer_facts(c), c.parallelism.model_parallel_size
    if size > 1 and not (facts.is_elementwise or facts.joins_split_weights):
        yield Problem(
            "optimizer.type",
            f"needs whole weights for its update, but model-parallel-size: {size} splits them",
            "set model-parallel-size: 1, or use Adam",
        )


def zero_with_other_optimizers_is_allowed_first(c: NeoXConfig) -> Iterator[Problem]:
    """Require zero_allow_untested_optimizer for optimizers that DeepSpeed has not tested with its ZeRO."""
    if chosen_engine(c).name != "deepspeed":
        return
    facts = OPTIMIZER_FACTS.get(c.optimizer.optimizer.kind)
    if facts is None or not facts.is_elementwise or facts.is_tried_with_zero or facts.replica_states:
        return
    if c.zero.zero_optimization.stage > 0 and not c.optimizer.zero_allow_untested_optimizer:
        yield Problem(
            "optimizer.type",
            "has not been tested with ZeRO by DeepSpeed",
            "add zero_allow_untested_optimizer: true (outside zero_optimization), use Adam, or set engine: "
            "torch, or stage: 0",
        )
