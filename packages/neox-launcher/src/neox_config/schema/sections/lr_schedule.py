"""Learning rate schedule."""

from neox_config.facts.learning_rate import (
    DECAY_STYLES,
    FINAL_DECAYS,
    LrDecayStyle,
    StableDecayStyle,
)
from neox_config.schema.parameter import Section, param

__all__ = ["LrScheduleSection"]

# With DeepSpeed's `scheduler` block, another curve is used.
_OWN_CURVE = "scheduler.type is null"
_LENGTH = "scheduler.type is null, or its total_num_steps is needed and null"
_FORMULAS = "; ".join(f"{name}: {decay.formula}" for name, decay in DECAY_STYLES.items())
_FINAL_FORMULAS = "; ".join(f"{name}: {decay.formula}" for name, decay in FINAL_DECAYS.items())


class LrScheduleSection(Section, resume="training"):
    """Warmup, decay and minimum of the learning rate; its peak is optimizer.params.lr."""

    lr_decay_style: LrDecayStyle = param(
        "linear",
        origin="Meg",
        used_when=_OWN_CURVE,
        doc="Decay after warmup, where t counts the updates since warmup and T those until lr-decay-iters. "
        f"{_FORMULAS}. wsd (warmup-stable-decay): lr, then a decay to min-lr in the last "
        "lr-wsd-decay-fraction of lr-decay-iters. Never below min-lr. Not together with scheduler.type, "
        "which replaces it.",
    )
    lr_decay_iters: int | None = param(
        None,
        origin="Meg",
        gt=0,
        le=1_000_000_000,
        used_when=_LENGTH,
        none_means="lr_decay_fraction of train_iters if that is set, else train_iters",
        doc="Number of iterations, including warmup, over which the learning rate decays.",
    )
    lr_decay_fraction: float | None = param(
        None,
        origin="NeoX",
        gt=0,
        le=1_000_000,
        used_when=_LENGTH,
        none_means="not set",
        doc="Sets lr-decay-iters to this fraction of train-iters, rounded down.",
    )
    lr_wsd_decay_style: StableDecayStyle = param(
        "linear",
        origin="ours",
        used_when="lr_decay_style is wsd",
        doc="Form of the decay of wsd, where d counts the updates since its start and L is its length. "
        f"{_FINAL_FORMULAS}.",
        source="arXiv:2405.18392",
    )
    lr_wsd_decay_fraction: float = param(
        0.1,
        origin="ours",
        gt=0,
        le=1,
        used_when="lr_decay_style is wsd",
        doc="Length of the decay of wsd as a fraction of lr-decay-iters, rounded down, at least 1 iteration.",
    )
    lr_wsd_decay_iters: int | None = param(
        None,
        origin="ours",
        gt=0,
        le=1_000_000_000,
        none_means="not set",
        used_when="lr_decay_style is wsd",
        doc="Length of the decay of wsd in iterations, instead of lr-wsd-decay-fraction.",
    )
    lr_wsd_decays: tuple[int, ...] = param(
        (),
        origin="ours",
        used_when="lr_decay_style is wsd",
        doc="Iterations at which further decays of wsd end, in order, before the last one at lr-decay-iters "
        "(WSD-S). After each the training continues from the decayed weights, and the learning rate is lr "
        "again. lr-wsd-decay-fraction is then that of the iterations since the end of the decay before. "
        "extra-save-iters saves the decayed weights.",
        source="arXiv:2410.05192",
    )
    min_lr: float = param(
        0.0, origin="Meg", ge=0, used_when=_OWN_CURVE, doc="Minimum learning rate after warmup."
    )
    decay_lr_to: float | None = param(
        None,
        origin="NeoX",
        ge=0,
        le=1,
        used_when=_OWN_CURVE,
        none_means="not set",
        doc="Sets min-lr to this fraction of optimizer.params.lr.",
    )
    warmup: float = param(
        0.01,
        origin="Meg",
        ge=0,
        le=1,
        used_when=_OWN_CURVE,
        doc="Fraction of lr-decay-iters for linear warmup; 0.01 is 1%.",
    )
    warmup_iters: int | None = param(
        None,
        origin="NeoX",
        ge=0,
        le=1_000_000_000,
        used_when=_OWN_CURVE,
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
