"""The learning rate over the iterations."""

from typing import Literal

from neox_launcher.config.parameter import Section, param

__all__ = ["LrScheduleSection"]


class LrScheduleSection(Section, resume="training"):
    """Warm-up, decay and floor of the learning rate; its peak is optimizer.params.lr."""

    lr_decay_style: Literal["constant", "linear", "cosine", "exponential"] = param(
        "linear",
        origin="Meg",
        doc="Curve after warm-up, over T updates (t = updates since): linear lr * (T - t) / T; "
        "cosine min-lr + "
        "(lr - min-lr) / 2 * (cos(pi * t / T) + 1); exponential lr * exp(-0.693 * t / T). Never "
        "below min-lr.",
    )
    lr_decay_iters: int | None = param(
        None,
        origin="Meg",
        gt=0,
        none_means="train_iters",
        doc="Iterations, warm-up included, until the rate stops falling.",
    )
    min_lr: float = param(0.0, origin="Meg", ge=0, doc="After the warm-up the rate does not fall below this.")
    warmup: float = param(
        0.01,
        origin="Meg",
        ge=0,
        le=1,
        doc="Part of lr-decay-iters in which the rate rises in a straight line; 0.01 is one hundredth.",
    )
    override_lr_scheduler: bool = param(
        False,
        origin="Meg",
        resume="free",
        doc="After loading, go on with the schedule written here, not with the checkpoint's.",
    )
    use_checkpoint_lr_scheduler: bool = param(
        False,
        origin="Meg",
        resume="free",
        doc="After loading, go on with the checkpoint's schedule, not with the one written here.",
    )
