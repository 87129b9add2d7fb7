"""Rules about the learning rate and the momentum."""

from collections.abc import Iterator
from itertools import pairwise

from neox_config.derive.learning_rate import (
    decay_iterations,
    decays_of_wsd,
    learning_rate_curve,
    warmup_fraction,
)
from neox_config.facts.optimizers import OPTIMIZER_FACTS
from neox_config.pluralize import pluralize
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig

_PARAMS = "scheduler.params"


def _knows_iterations(c: NeoXConfig) -> bool:
    """Return False for a configuration with train_epochs; it is checked again when its data is known."""
    return c.training.train_iters is not None


def floor_is_below_the_peak(c: NeoXConfig) -> Iterator[Problem]:
    """Require the minimum learning rate to be at most its peak."""
    lr = c.optimizer.optimizer.params.lr
    if c.optimizer.scheduler.type is None and c.lr_schedule.min_lr > lr:
        yield Problem("min_lr", f"is more than optimizer.params.lr: {lr}", "set a smaller min-lr")


# Parameters of which at most one sets the same value.
_SAME_VALUE = {
    "warmup_iters": "warmup",
    "decay_lr_to": "min_lr",
    "lr_decay_fraction": "lr_decay_iters",
    "lr_wsd_decay_iters": "lr_wsd_decay_fraction",
}


def each_part_of_the_schedule_is_set_once(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse two parameters that set the same part of the learning rate schedule."""
    given = c.lr_schedule.model_fields_set
    for name, other in _SAME_VALUE.items():
        # A shown configuration also contains defaults.
        unset = (None, type(c.lr_schedule).model_fields[other].default)
        if c.value_of(name) is not None and other in given and c.value_of(other) not in unset:
            one, two = name.replace("_", "-"), other.replace("_", "-")
            yield Problem(name, f"and {two} set the same value", f"remove {one} or {two}")


def the_warmup_ends_before_the_decay(c: NeoXConfig) -> Iterator[Problem]:
    """Require warmup_iters to be at most the iterations of the decay."""
    if not _knows_iterations(c):
        return
    iterations = decay_iterations(c)
    if c.optimizer.scheduler.type is None and (c.lr_schedule.warmup_iters or 0) > iterations:
        yield Problem(
            "warmup_iters",
            f"is more than the {pluralize(iterations, 'iteration')} of the schedule",
            f"use at most {iterations}, or set lr-decay-iters",
        )


def the_parts_of_wsd_fit_the_schedule(c: NeoXConfig) -> Iterator[Problem]:
    """Require that each decay of wsd starts after the warmup, and after the end of the decay before."""
    if not _knows_iterations(c):
        return
    iterations = decay_iterations(c)
    if c.optimizer.scheduler.type is not None or c.lr_schedule.lr_decay_style != "wsd":
        return
    ends = (0, *c.lr_schedule.lr_wsd_decays, iterations)
    if any(end >= following for end, following in pairwise(ends)):
        what = f"must be in order, and less than the {pluralize(iterations, 'iteration')} of the schedule"
        yield Problem("lr_wsd_decays", what, "remove the others")
        return
    earlier = warmup_fraction(c, decay_iterations=iterations) * iterations
    before = f"the warmup of {earlier:g} ends"
    for end, decay in decays_of_wsd(c, decay_iterations=iterations):
        if earlier + decay > end:
            name = "lr_wsd_decay_iters" if c.lr_schedule.lr_wsd_decay_iters else "lr_wsd_decay_fraction"
            yield Problem(
                name,
                f"makes a decay of {pluralize(decay, 'iteration')} until iteration {end:,} that starts "
                f"before {before}",
                "set a shorter decay or warmup",
            )
            return
        earlier, before = end, f"the decay until iteration {end:,} ends"


def a_scheduler_has_a_type(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse arguments of a scheduler, other than their defaults, without its type."""
    scheduler = c.optimizer.scheduler
    defaults = type(scheduler.params)().model_dump()
    if scheduler.type is None and scheduler.params.model_dump() != defaults:
        remedy = "add scheduler: {type: WarmupLR}, for example, or remove the block"
        yield Problem("scheduler.params", "requires scheduler.type", remedy, value="")


def one_schedule_is_given(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse a scheduler together with a decay style, because the documents do not rank them.

    The default style, which `neox-config show` prints, only gets a note.
    """
    scheduler, style = c.optimizer.scheduler, c.lr_schedule.lr_decay_style
    if scheduler.type is not None and style != type(c.lr_schedule).model_fields["lr_decay_style"].default:
        yield Problem(
            "lr_decay_style",
            f"and scheduler.type: {scheduler.type} are two learning rate schedules",
            "remove lr-decay-style, or the scheduler block",
        )


def one_cycle_has_learning_rates(c: NeoXConfig) -> Iterator[Problem]:
    """Require the two learning rates of OneCycle, which have no generally valid default."""
    scheduler = c.optimizer.scheduler
    for name, example in {"cycle_min_lr": "0.0001", "cycle_max_lr": "0.001"}.items():
        if scheduler.type == "OneCycle" and getattr(scheduler.params, name) is None:
            remedy = f"add {name}: {example} to scheduler.params"
            yield Problem(f"{_PARAMS}.{name}", "is required by OneCycle", remedy, value="")


def bounds_of_the_scheduler_are_ordered(c: NeoXConfig) -> Iterator[Problem]:
    """Require each lower bound of the scheduler's values to be at most the upper one."""
    scheduler, params = c.optimizer.scheduler, c.optimizer.scheduler.params
    if scheduler.type in ("WarmupLR", "WarmupDecayLR"):
        above, name = params.warmup_max_lr, f"{_PARAMS}.warmup_max_lr"
        if above is None:
            above, name = c.optimizer.optimizer.params.lr, "optimizer.params.lr"
        yield from _inverted("warmup_min_lr", params.warmup_min_lr, name, above)
    if scheduler.type == "OneCycle":
        yield from _inverted(
            "cycle_min_lr", params.cycle_min_lr, f"{_PARAMS}.cycle_max_lr", params.cycle_max_lr
        )
    if scheduler.type == "OneCycle" and params.cycle_momentum:
        yield from _inverted(
            "cycle_min_mom", params.cycle_min_mom, f"{_PARAMS}.cycle_max_mom", params.cycle_max_mom
        )


def _inverted(name: str, below: float | None, other: str, above: float | None) -> Iterator[Problem]:
    if below is not None and above is not None and below > above:
        yield Problem(f"{_PARAMS}.{name}", f"is more than {other}: {above}", "set a smaller value")


def the_warmup_of_the_scheduler_ends_before_its_decay(c: NeoXConfig) -> Iterator[Problem]:
    """Require warmup_num_steps to be at most the steps of the schedule."""
    scheduler, params = c.optimizer.scheduler, c.optimizer.scheduler.params
    if not (params.total_num_steps or _knows_iterations(c)):
        return
    steps = params.total_num_steps or decay_iterations(c)
    if scheduler.type in ("WarmupDecayLR", "WarmupCosineLR") and params.warmup_num_steps > steps:
        is_default = "warmup_num_steps" not in params.model_fields_set
        origin = f"is not set; its default, {params.warmup_num_steps:,}," if is_default else ""
        yield Problem(
            f"{_PARAMS}.warmup_num_steps",
            f"{origin} is more than the {pluralize(steps, 'iteration')} of the schedule".strip(),
            f"set it to at most {steps}, or set scheduler.params.total_num_steps",
        )


def the_optimizer_has_a_momentum_to_cycle(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse OneCycle's momentum with an optimizer without one, or with momentum switched off."""
    scheduler, optimizer = c.optimizer.scheduler, c.optimizer.optimizer
    facts = OPTIMIZER_FACTS.get(optimizer.kind)
    if scheduler.type != "OneCycle" or not scheduler.params.cycle_momentum or facts is None:
        return
    off = "set scheduler.params.cycle_momentum: false"
    if facts.momentum is None:
        what = f"has an effect on the momentum, and {facts.name} has none"
        yield Problem(f"{_PARAMS}.cycle_momentum", what, f"{off}, or use another optimizer")
        return
    needs_buffer = "momentum" in facts.optional.values()
    if needs_buffer and not facts.arguments_in_effect(optimizer.params.given())["momentum"]:
        what = f"has an effect on the momentum, and {facts.name} stores none while momentum is 0"
        yield Problem(f"{_PARAMS}.cycle_momentum", what, f"add momentum: 0.9 to optimizer.params, or {off}")
    if needs_buffer and scheduler.params.cycle_min_mom == 0:
        what = f"must be more than 0: {facts.name} stores no momentum while it is 0"
        yield Problem(f"{_PARAMS}.cycle_min_mom", what, "set a small number")


def the_momentum_stays_below_one(c: NeoXConfig) -> Iterator[Problem]:
    """Require that the momentum, which grows after the cycle, stays below 1 until the end of the run."""
    if not _knows_iterations(c):
        return
    scheduler, last = c.optimizer.scheduler, c.training.iterations - 1
    params = scheduler.params
    if scheduler.type != "OneCycle" or None in (params.cycle_min_lr, params.cycle_max_lr):
        return
    momentum = learning_rate_curve(c, decay_iterations=decay_iterations(c)).momentum(last)
    if momentum is not None and momentum >= 1:
        yield Problem(
            f"{_PARAMS}.decay_mom_rate",
            f"makes the momentum {momentum:.6g} in the last iteration; it must be less than 1",
            "set a smaller rate or a larger decay_step_size",
        )
