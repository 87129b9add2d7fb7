"""The learning rate of every update, from configuration alone; the model package's schedule has the same."""

import math
from collections.abc import Iterator

from neox_launcher.config.resolve import Resolved

__all__ = ["learning_rate", "learning_rates"]


def learning_rate(resolved: Resolved, update: int) -> float:
    """The rate of update number `update`, counted from 0.

    Source: the formulas of GPT-NeoX's annealing schedule, with the decay counted from the end of the warm-up.
    """
    schedule = resolved.config.lr_schedule
    peak = resolved.config.optimizer.optimizer.params.lr
    iterations = resolved.derived.lr_decay_iters
    warmup = schedule.warmup * iterations
    place = min(update, iterations)
    if warmup > 0 and place <= warmup:
        return peak * min(1.0, max(1, place) / warmup)
    progress = (place - warmup) / (iterations - warmup)
    floor = schedule.min_lr
    rates = {
        "constant": peak,
        "linear": peak * (1.0 - progress),
        "cosine": floor + (peak - floor) / 2 * (math.cos(math.pi * progress) + 1),
        "exponential": peak * math.exp(-0.693 * progress),
    }
    return max(floor, rates[schedule.lr_decay_style])


def learning_rates(resolved: Resolved, points: int) -> Iterator[tuple[int, float]]:
    """Updates spread evenly over the training, with the ends of warm-up and decay, and their rates."""
    last = resolved.config.training.train_iters - 1
    decay = resolved.derived.lr_decay_iters
    spread = {round(last * place / max(1, points - 1)) for place in range(points)}
    turns = {round(resolved.config.lr_schedule.warmup * decay), decay}
    for update in sorted(spread | {turn for turn in turns if 0 <= turn <= last}):
        yield update, learning_rate(resolved, update)
