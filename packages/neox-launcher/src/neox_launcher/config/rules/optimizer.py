"""Rules about the optimizer and its learning rate."""

from collections.abc import Iterator

from neox_launcher.config.problems import Problem, did_you_mean
from neox_launcher.config.schema import NeoXConfig
from neox_launcher.config.sections.optimizer import KNOWN_OPTIMIZERS, TORCH_OPTIMIZERS


def the_optimizer_is_known(c: NeoXConfig) -> Iterator[Problem]:
    """One of ours, of DeepSpeed's or of torch's."""
    optimizer = c.optimizer.optimizer
    names = (*KNOWN_OPTIMIZERS, *TORCH_OPTIMIZERS)
    if optimizer.kind not in [name.lower() for name in names]:
        near = did_you_mean(optimizer.type, names)
        yield Problem("optimizer.type", "is no optimizer here", near or f"use {', '.join(names)}")


def known_optimizers_know_their_arguments(c: NeoXConfig) -> Iterator[Problem]:
    """A misspelt argument of an optimizer that we know is found here and not by its constructor."""
    optimizer = c.optimizer.optimizer
    if optimizer.kind not in [name.lower() for name in KNOWN_OPTIMIZERS]:
        return
    extra_names = {"sm3": ("momentum", "beta"), "madgrad_wd": ("momentum",)}.get(optimizer.kind, ())
    for name in optimizer.params.model_extra or {}:
        if name not in extra_names:
            remedy = (
                did_you_mean(name, type(optimizer.params).model_fields, cutoff=0.6) or "check its spelling"
            )
            yield Problem(f"optimizer.params.{name}", f"is no argument of {optimizer.type}", remedy)


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


def zero_with_other_optimizers_is_allowed_first(c: NeoXConfig) -> Iterator[Problem]:
    """DeepSpeed has tried ZeRO with Adam and LAMB."""
    optimizer = c.optimizer
    tested = [name.lower() for name in KNOWN_OPTIMIZERS if name not in ("SM3", "madgrad_wd")]
    is_tested = optimizer.optimizer.kind in tested
    if c.zero.zero_optimization.stage > 0 and not is_tested and not optimizer.zero_allow_untested_optimizer:
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
