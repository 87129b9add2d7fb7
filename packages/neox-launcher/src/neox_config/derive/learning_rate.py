"""Learning rate of every update, computed from the configuration."""

from collections.abc import Iterator

from neox_config.derive.resolve import Resolved
from neox_config.facts.learning_rate import WarmupThenDecay
from neox_config.schema.config import NeoXConfig

__all__ = [
    "learning_rate",
    "learning_rate_curve",
    "learning_rates",
    "minimum_rate",
    "warmup_fraction",
]


def learning_rate_curve(config: NeoXConfig, *, decay_iterations: int) -> WarmupThenDecay:
    """Return the configured learning rate by the number of the update."""
    section = config.lr_schedule
    return WarmupThenDecay(
        style=section.lr_decay_style,
        peak=config.optimizer.optimizer.params.lr,
        floor=minimum_rate(config),
        warmup=warmup_fraction(config, decay_iterations=decay_iterations),
        decay_iterations=decay_iterations,
    )


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


def learning_rate(resolved: Resolved, update: int) -> float:
    """Return the learning rate of update number `update`, starting at 0."""
    decay = resolved.derived.lr_decay_iters
    return learning_rate_curve(resolved.config, decay_iterations=decay).rate(update)


def learning_rates(resolved: Resolved, points: int) -> Iterator[tuple[int, float]]:
    """Yield evenly spaced updates and their learning rates, including the ends of warmup and decay."""
    last = resolved.config.training.train_iters - 1
    decay = resolved.derived.lr_decay_iters
    spread = {round(last * place / max(1, points - 1)) for place in range(points)}
    warmup = warmup_fraction(resolved.config, decay_iterations=decay)
    turns = {round(warmup * decay), decay}
    for update in sorted(spread | {turn for turn in turns if 0 <= turn <= last}):
        yield update, learning_rate(resolved, update)
