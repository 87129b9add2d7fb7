"""Rules about the optimizer and its learning rate."""

from collections.abc import Iterator

from neox_launcher.config.optimizers import OPTIMIZER_FACTS
from neox_launcher.config.problems import Problem, did_you_mean
from neox_launcher.config.schema import NeoXConfig


def the_optimizer_is_known(c: NeoXConfig) -> Iterator[Problem]:
    """One of ours, of DeepSpeed's or of torch's."""
    optimizer = c.optimizer.optimizer
    if optimizer.kind not in OPTIMIZER_FACTS:
        names = [facts.name for facts in OPTIMIZER_FACTS.values()]
        near = did_you_mean(optimizer.type, names)
        yield Problem("optimizer.type", "is no optimizer here", near or f"use {', '.join(names)}")


def optimizers_know_their_arguments(c: NeoXConfig) -> Iterator[Problem]:
    """A misspelt argument, or one of another optimizer, is found here and not by a constructor."""
    facts = OPTIMIZER_FACTS.get(c.optimizer.optimizer.kind)
    if facts is None:
        return
    params = c.optimizer.optimizer.params
    declared = ("lr", "weight_decay") if facts.is_of_torch else tuple(type(params).model_fields)
    known = (*declared, *facts.arguments)
    for name in params.given():
        if name in facts.refused:
            yield Problem(f"optimizer.params.{name}", facts.refused[name], "leave it out")
        elif name not in known:
            others = f"leave it out, or use {', '.join(facts.arguments)}" if facts.is_of_torch else ""
            remedy = did_you_mean(name, known, cutoff=0.6) or others or "check its spelling"
            yield Problem(f"optimizer.params.{name}", f"is no argument of {facts.name}", remedy)


def betas_are_decays(c: NeoXConfig) -> Iterator[Problem]:
    """Adam's running means forget."""
    betas = c.optimizer.optimizer.params.betas
    if not all(0 <= beta < 1 for beta in betas):
        yield Problem(
            "optimizer.params.betas",
            "must be two numbers, each at least 0 and less than 1",
            "use [0.9, 0.95]",
        )


def one_bit_adam_is_told_how_to_communicate(c: NeoXConfig) -> Iterator[Problem]:
    """Its three keys have no value that is right everywhere."""
    optimizer = c.optimizer.optimizer
    needed = {"freeze_step": "100000", "cuda_aware": "false", "comm_backend_name": "nccl"}
    for name, example in needed.items():
        if optimizer.kind == "onebitadam" and name not in optimizer.params.model_fields_set:
            yield Problem(
                f"optimizer.params.{name}",
                f"is missing, and {optimizer.type} needs it",
                f"add {name}: {example} to optimizer.params",
                value="",
            )


def zero_cuts_weights_for_elementwise_optimizers_only(c: NeoXConfig) -> Iterator[Problem]:
    """ZeRO updates flat parts of weights, which have no rows, columns or norms of whole weights."""
    facts = OPTIMIZER_FACTS.get(c.optimizer.optimizer.kind)
    if c.zero.zero_optimization.stage > 0 and facts is not None and not facts.is_elementwise:
        yield Problem(
            "optimizer.type",
            "needs means or norms over whole weights, and ZeRO gives it flat parts of weights; "
            "zero_allow_untested_optimizer does not change that",
            "set zero_optimization.stage: 0, or use Adam",
        )


def tensor_parallelism_splits_weights_for_elementwise_optimizers_only(c: NeoXConfig) -> Iterator[Problem]:
    """Tensor-parallel ranks update their own parts of a weight."""
    facts = OPTIMIZER_FACTS.get(c.optimizer.optimizer.kind)
    size = c.parallelism.model_parallel_size
    if size > 1 and facts is not None and not facts.is_elementwise:
        yield Problem(
            "optimizer.type",
            f"needs means or norms over whole weights, and with model-parallel-size: {size} a rank "
            "holds a part of it",
            "set model-parallel-size: 1, or use Adam",
        )


def zero_with_other_optimizers_is_allowed_first(c: NeoXConfig) -> Iterator[Problem]:
    """DeepSpeed has tried ZeRO with Adam."""
    facts = OPTIMIZER_FACTS.get(c.optimizer.optimizer.kind)
    if facts is None or not facts.is_elementwise or facts.is_tried_with_zero:
        return
    if c.zero.zero_optimization.stage > 0 and not c.optimizer.zero_allow_untested_optimizer:
        yield Problem(
            "optimizer.type",
            "has not been tried with ZeRO by DeepSpeed",
            "add zero_allow_untested_optimizer: true (outside zero_optimization), or use Adam, or stage: 0",
        )


def floor_is_below_the_peak(c: NeoXConfig) -> Iterator[Problem]:
    """The learning rate's floor is not above its peak."""
    lr = c.optimizer.optimizer.params.lr
    if c.lr_schedule.min_lr > lr:
        yield Problem("min_lr", f"is more than optimizer.params.lr: {lr}", "set a smaller min-lr")


def one_schedule_after_loading(c: NeoXConfig) -> Iterator[Problem]:
    """Either the checkpoint's schedule or the configuration's wins."""
    if c.lr_schedule.override_lr_scheduler and c.lr_schedule.use_checkpoint_lr_scheduler:
        yield Problem(
            "override_lr_scheduler", "excludes use-checkpoint-lr-scheduler: true", "set one of them to false"
        )
