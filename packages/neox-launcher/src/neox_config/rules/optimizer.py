"""Rules about the optimizer and its learning rate."""

from collections.abc import Iterator

from neox_config.derive.engine import engine_offers
from neox_config.derive.resolve import decay_iterations
from neox_config.facts.optimizers import OPTIMIZER_FACTS
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


def betas_are_below_one(c: NeoXConfig) -> Iterator[Problem]:
    """Require Adam betas in [0, 1)."""
    betas = c.optimizer.optimizer.params.betas
    if not all(0 <= beta < 1 for beta in betas):
        yield Problem(
            "optimizer.params.betas",
            "must be two numbers, each at least 0 and less than 1",
            "use [0.9, 0.95]",
        )


def one_bit_adam_is_told_how_to_communicate(c: NeoXConfig) -> Iterator[Problem]:
    """Require the three communication arguments of OneBitAdam, which have no generally valid default."""
    optimizer = c.optimizer.optimizer
    needed = {"freeze_step": "100000", "cuda_aware": "false", "comm_backend_name": "nccl"}
    for name, example in needed.items():
        if optimizer.kind == "onebitadam" and name not in optimizer.params.model_fields_set:
            yield Problem(
                f"optimizer.params.{name}",
                f"is required by {optimizer.type}",
                f"add {name}: {example} to optimizer.params",
                value="",
            )


def zero_cuts_weights_for_elementwise_optimizers_only(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse ZeRO with optimizers that need whole weights, because it updates flat partitions."""
    facts = OPTIMIZER_FACTS.get(c.optimizer.optimizer.kind)
    if facts is not None and not facts.is_elementwise and not engine_offers(c, "whole_weights"):
        yield Problem(
            "optimizer.type",
            "needs means or norms over whole weights, but ZeRO partitions weights; "
            "zero_allow_untested_optimizer does not change that",
            "set zero_optimization.stage: 0, or use Adam",
        )


def tensor_parallelism_splits_weights_for_elementwise_optimizers_only(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse tensor parallelism with optimizers that need whole weights, because it splits them."""
    facts = OPTIMIZER_FACTS.get(c.optimizer.optimizer.kind)
    size = c.parallelism.model_parallel_size
    if size > 1 and facts is not None and not facts.is_elementwise:
        yield Problem(
            "optimizer.type",
            f"needs means or norms over whole weights, but model-parallel-size: {size} splits them",
            "set model-parallel-size: 1, or use Adam",
        )


def zero_with_other_optimizers_is_allowed_first(c: NeoXConfig) -> Iterator[Problem]:
    """Require zero_allow_untested_optimizer for optimizers that DeepSpeed has not tested with ZeRO."""
    facts = OPTIMIZER_FACTS.get(c.optimizer.optimizer.kind)
    if facts is None or not facts.is_elementwise or facts.is_tried_with_zero:
        return
    if c.zero.zero_optimization.stage > 0 and not c.optimizer.zero_allow_untested_optimizer:
        yield Problem(
            "optimizer.type",
            "has not been tested with ZeRO by DeepSpeed",
            "add zero_allow_untested_optimizer: true (outside zero_optimization), use Adam, or set stage: 0",
        )


def floor_is_below_the_peak(c: NeoXConfig) -> Iterator[Problem]:
    """Require the minimum learning rate to be at most its peak."""
    lr = c.optimizer.optimizer.params.lr
    if c.lr_schedule.min_lr > lr:
        yield Problem("min_lr", f"is more than optimizer.params.lr: {lr}", "set a smaller min-lr")


# Parameters of which at most one sets the same value.
_SAME_VALUE = {"warmup_iters": "warmup", "decay_lr_to": "min_lr", "lr_decay_fraction": "lr_decay_iters"}


def each_part_of_the_schedule_is_set_once(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse two parameters that set the same part of the learning rate schedule."""
    given = c.lr_schedule.model_fields_set
    for name, other in _SAME_VALUE.items():
        if c.value_of(name) is not None and other in given and c.value_of(other) is not None:
            one, two = name.replace("_", "-"), other.replace("_", "-")
            yield Problem(name, f"and {two} set the same value", f"remove {one} or {two}")


def the_warmup_ends_before_the_decay(c: NeoXConfig) -> Iterator[Problem]:
    """Require warmup_iters to be at most the iterations of the decay."""
    iterations = decay_iterations(c)
    if (c.lr_schedule.warmup_iters or 0) > iterations:
        yield Problem(
            "warmup_iters",
            f"is more than the {iterations:,} iterations of the schedule",
            f"use at most {iterations}, or set lr-decay-iters",
        )


def one_schedule_after_loading(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse both ways of choosing the schedule when resuming."""
    if c.lr_schedule.override_lr_scheduler and c.lr_schedule.use_checkpoint_lr_scheduler:
        yield Problem(
            "override_lr_scheduler",
            "and use-checkpoint-lr-scheduler cannot both be true",
            "set one of them to false",
        )
