"""Learning rate and momentum of every update, computed from the configuration."""

from dataclasses import asdict, fields
from itertools import pairwise
from math import floor

from neox_config.facts.curves import CURVES
from neox_config.facts.deepspeed_schedules import ScheduleType, WarmupDecayLR
from neox_config.facts.learning_rate import Curve, RepeatedDecay, WarmupStableDecay, WarmupThenDecay
from neox_config.schema.config import NeoXConfig

__all__ = [
    "decay_iterations",
    "decays_of_wsd",
    "learning_rate_curve",
    "minimum_rate",
    "peak_instead_of_lr",
    "peak_rate",
    "uses_decay_iterations",
    "warmup_fraction",
]


def decay_iterations(config: NeoXConfig) -> int:
    """Return the number of iterations, including warmup, over which the learning rate decays."""
    schedule, training = config.lr_schedule, config.training
    if schedule.lr_decay_fraction is not None:
        return max(1, floor(training.iterations * schedule.lr_decay_fraction))
    return schedule.lr_decay_iters or training.iterations


def learning_rate_curve(config: NeoXConfig, *, decay_iterations: int) -> Curve:
    """Return the configured learning rate by the number of the update."""
    if config.optimizer.scheduler.type is not None:
        return _scheduler_curve(config, config.optimizer.scheduler.type, decay_iterations)
    if config.optimizer.optimizer.kind == "onebitadam":
        return _one_bit_curve(config, decay_iterations)
    return _own_curve(config, decay_iterations)


def minimum_rate(config: NeoXConfig) -> float:
    """Return the minimum learning rate after warmup."""
    section = config.lr_schedule
    if section.decay_lr_to is None:
        return section.min_lr
    return section.decay_lr_to * config.optimizer.optimizer.params.lr


def warmup_fraction(config: NeoXConfig, *, decay_iterations: int) -> float:
    """Return the fraction of `decay_iterations` used for the warmup."""
    section = config.lr_schedule
    return section.warmup if section.warmup_iters is None else section.warmup_iters / decay_iterations


def decays_of_wsd(config: NeoXConfig, *, decay_iterations: int) -> list[tuple[int, int]]:
    """Return the decays of wsd: the iterations until the end of each, and those of the decay itself.

    A fraction is that of the iterations since the end of the decay before.
    """
    section = config.lr_schedule
    return [
        # 0.29 * 100 is a little less than 29.
        (
            end,
            section.lr_wsd_decay_iters or max(1, floor(section.lr_wsd_decay_fraction * (end - last) + 1e-9)),
        )
        for last, end in pairwise((0, *section.lr_wsd_decays, decay_iterations))
    ]


def uses_decay_iterations(config: NeoXConfig) -> bool:
    """Return True if the curve depends on the number of iterations over which the learning rate decays."""
    scheduler = config.optimizer.scheduler
    decays = scheduler.type in ("WarmupDecayLR", "WarmupCosineLR")
    return scheduler.type is None or (decays and scheduler.params.total_num_steps is None)


def peak_instead_of_lr(config: NeoXConfig) -> str | None:
    """Return the argument of the scheduler that replaces optimizer.params.lr; None if lr is used."""
    scheduler = config.optimizer.scheduler
    name = {"OneCycle": "cycle_max_lr", "LRRangeTest": "lr_range_test_min_lr"}.get(scheduler.type or "")
    if scheduler.type in ("WarmupLR", "WarmupDecayLR") and scheduler.params.warmup_max_lr is not None:
        name = "warmup_max_lr"
    return None if name is None else f"scheduler.params.{name}"


def peak_rate(config: NeoXConfig) -> float | None:
    """Return the largest learning rate of the schedule, of LRRangeTest the first; None if it is missing."""
    rate: float | None = config.value_of(peak_instead_of_lr(config) or "optimizer.params.lr")
    return rate


def _own_curve(config: NeoXConfig, decay_iterations: int) -> Curve:
    """Return the curve of lr-decay-style."""
    style, peak = config.lr_schedule.lr_decay_style, config.optimizer.optimizer.params.lr
    lowest, warmup = minimum_rate(config), warmup_fraction(config, decay_iterations=decay_iterations)
    if style != "wsd":
        return WarmupThenDecay(
            style=style, peak=peak, floor=lowest, warmup=warmup, decay_iterations=decay_iterations
        )
    *earlier, (_, final) = decays_of_wsd(config, decay_iterations=decay_iterations)
    curve = WarmupStableDecay(
        style=config.lr_schedule.lr_wsd_decay_style,
        peak=peak,
        floor=lowest,
        warmup=warmup,
        iterations=decay_iterations,
        decay_iterations=final,
    )
    return RepeatedDecay(**asdict(curve), earlier=tuple(earlier)) if earlier else curve


def _one_bit_curve(config: NeoXConfig, decay_iterations: int) -> Curve:
    """Return the curve of OneBitAdam, as GPT-NeoX documents it: WarmupDecayLR from lr, min-lr and warmup.

    The warmup is a fraction of all iterations of the run.
    """
    iterations = config.training.iterations
    warmup = warmup_fraction(config, decay_iterations=iterations)
    return WarmupDecayLR(
        warmup_min_lr=minimum_rate(config),
        warmup_max_lr=config.optimizer.optimizer.params.lr,
        warmup_num_steps=max(1, int(warmup * iterations + 1e-9)),
        warmup_type="log",
        total_num_steps=decay_iterations,
    )


def _scheduler_curve(config: NeoXConfig, kind: ScheduleType, decay_iterations: int) -> Curve:
    """Return the curve of a scheduler of DeepSpeed's, whose arguments have the names of parameters."""
    params, lr = config.optimizer.scheduler.params, config.optimizer.optimizer.params.lr
    if_none = {
        "lr": lr,
        "warmup_max_lr": lr,
        "total_num_steps": decay_iterations,
        "cycle_second_step_size": params.cycle_first_step_size,
        "cycle_second_stair_count": params.cycle_first_stair_count,
    }
    curve = CURVES[kind]
    given = {each.name: getattr(params, each.name, None) for each in fields(curve)}
    return curve(**{name: if_none[name] if value is None else value for name, value in given.items()})
