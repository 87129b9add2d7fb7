"""The values of each iteration of a run: learning rate, momentum, batch size, lengths, difficulties."""

from collections.abc import Callable, Mapping

from neox_config.extras.data_efficiency.curricula import drawn_difficulties, length_schedule
from neox_config.facts.learning_rate import Curve
from neox_config.spec.resolve import Resolved

__all__ = ["LEARNING_RATE", "MOMENTUM", "course_of", "learning_rate", "spread_iterations"]

LEARNING_RATE, MOMENTUM = "learning rate", "momentum"

Course = Mapping[str, Callable[[int], float]]


def course_of(resolved: Resolved) -> Course:
    """Return the values by iteration, counted from 0: name -> function. The momentum is there if it changes.

    With a curriculum that draws samples, so is the largest difficulty of each of its metrics. The learning
    rate and the momentum are those of an update; iterations whose update is skipped repeat it.
    """
    curve = _curve(resolved)
    whole, batch = resolved.run.batch.length, resolved.run.batch.whole
    course: dict[str, Callable[[int], float]] = {
        LEARNING_RATE: curve.rate,
        "batch size": lambda iteration: batch,
        "sequence length": length_schedule(resolved.data.efficiency) or (lambda iteration: whole),
    }
    if curve.changes_momentum:
        course[MOMENTUM] = curve.momentum  # type: ignore[assignment]
    return course | drawn_difficulties(resolved.data.efficiency)


def _curve(resolved: Resolved) -> Curve:
    assert resolved.update.curve is not None, "the number of iterations is known"
    return resolved.update.curve


def learning_rate(resolved: Resolved, update: int) -> float:
    """Return the learning rate of update number `update`, starting at 0."""
    return course_of(resolved)[LEARNING_RATE](update)


def spread_iterations(resolved: Resolved, points: int) -> list[int]:
    """Return evenly spaced iterations of the run, and those at which the learning rate turns."""
    last = resolved.config.training.iterations - 1
    curve = _curve(resolved)
    spread = {round(last * place / max(1, points - 1)) for place in range(points)}
    return sorted(spread | {turn for turn in curve.turns() if 0 <= turn <= last})
