"""Learning rate schedule."""

from neox_config.facts.learning_rate import DECAY_STYLES, DecayStyle
from neox_config.schema.parameter import Section, param

__all__ = ["LrScheduleSection"]

_FORMULAS = "; ".join(f"{name}: {decay.formula}" for name, decay in DECAY_STYLES.items())


class LrScheduleSection(Section, resume="training"):
    """Warmup, decay and minimum of the learning rate; its peak is optimizer.params.lr."""

    lr_decay_style: DecayStyle = param(
        "linear",
        origin="Meg",
        doc="Decay after warmup, where t counts the updates since warmup and T those until lr-decay-iters. "
        f"{_FORMULAS}. Never below min-lr.",
    )
    lr_decay_iters: int | None = param(
        None,
        origin="Meg",
        gt=0,
        le=1_000_000_000,
        none_means="lr_decay_fraction of train_iters if that is set, else train_iters",
        doc="Number of iterations, including warmup, over which the learning rate decays.",
    )
    lr_decay_fraction: float | None = param(
        None,
        origin="NeoX",
        gt=0,
        le=1_000_000,
        none_means="not set",
        doc="Sets lr-decay-iters to this fraction of train-iters, rounded down.",
    )
    min_lr: float = param(0.0, origin="Meg", ge=0, doc="Minimum learning rate after warmup.")
    decay_lr_to: float | None = param(
        None,
        origin="NeoX",
        ge=0,
        le=1,
        none_means="not set",
        doc="Sets min-lr to this fraction of optimizer.params.lr.",
    )
    warmup: float = param(
        0.01,
        origin="Meg",
        ge=0,
        le=1,
        doc="Fraction of lr-decay-iters for linear warmup; 0.01 is 1%.",
    )
    warmup_iters: int | None = param(
        None,
        origin="NeoX",
        ge=0,
        le=1_000_000_000,
        none_means="not set",
        doc="Number of iterations of linear warmup, instead of the fraction `warmup`.",
    )
    override_lr_scheduler: bool = param(
        False,
        origin="Meg",
        resume="free",
        doc="When resuming, use the schedule of this configuration, not that of the checkpoint.",
    )
    use_checkpoint_lr_scheduler: bool = param(
        False,
        origin="Meg",
        resume="free",
        doc="When resuming, use the schedule of the checkpoint, not that of this configuration.",
    )
