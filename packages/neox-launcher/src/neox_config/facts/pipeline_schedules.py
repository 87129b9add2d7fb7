"""The order in which pipeline stages run forward and backward passes: what each schedule requires and costs.

With more than one chunk per stage, a stage of P holds several parts of the model instead of one: chunk c of
stage s is part c P + s of the model ("loop"), or the stages are visited forth and back ("v").
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "SCHEDULES",
    "Placement",
    "ScheduleFacts",
    "ScheduleName",
    "has_zero_stage",
    "idle_share",
    "most_passes_in_flight",
    "stage_of_part",
    "why_not_micro_batches",
]

ScheduleName = Literal["1f1b", "interleaved", "zero_bubble", "zbv"]
Placement = Literal["loop", "v"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFacts:
    """What the configuration must know about a schedule.

    Args:
        chunks: chunks per stage unless `virtual_pipeline_stages` is given.
        least_chunks: fewest chunks per stage.
        most_chunks: most chunks per stage; None: any number.
        splits_backward: the gradients of weights are computed apart from those of activations, later.
        placement: which stage holds which part of the model.
        source: where it was published.
    """

    chunks: int
    least_chunks: int
    most_chunks: int | None
    splits_backward: bool
    placement: Placement
    source: str


SCHEDULES: Mapping[ScheduleName, ScheduleFacts] = {
    "1f1b": ScheduleFacts(
        chunks=1,
        least_chunks=1,
        most_chunks=1,
        splits_backward=False,
        placement="loop",
        source="arXiv:2006.09503",
    ),
    "interleaved": ScheduleFacts(
        chunks=2,
        least_chunks=2,
        most_chunks=None,
        splits_backward=False,
        placement="loop",
        source="arXiv:2104.04473",
    ),
    "zero_bubble": ScheduleFacts(
        chunks=1,
        least_chunks=1,
        most_chunks=None,
        splits_backward=True,
        placement="loop",
        source="arXiv:2401.10241",
    ),
    "zbv": ScheduleFacts(
        chunks=2,
        least_chunks=2,
        most_chunks=2,
        splits_backward=True,
        placement="v",
        source="arXiv:2401.10241, section 6",
    ),
}
"""Name -> what it requires."""


def has_zero_stage(schedule: ScheduleName, stage: int) -> bool:
    """Return True if a schedule can run with a ZeRO stage: stage 3 frees weights after each pass."""
    return stage < 3 or not SCHEDULES[schedule].splits_backward


def stage_of_part(part: int, *, stages: int, placement: Placement) -> int:
    """Return the stage that holds a part of the model, both counted from 0."""
    turn, place = divmod(part, stages)
    return stages - 1 - place if placement == "v" and turn % 2 else place


def why_not_micro_batches(schedule: ScheduleName, *, stages: int, micro_batches: int) -> str | None:
    """Return why a schedule cannot run this number of micro-batches per update; None if it can.

    1F1B and ZBV run any number. The schedules with turns run `micro_batches // stages` rounds of equal size;
    with fewer micro-batches than stages there is one round.
    """
    if schedule == "1f1b":
        return None
    if SCHEDULES[schedule].placement == "v":
        return None
    rounds = max(1, micro_batches // stages)
    if micro_batches % rounds:
        return (
            f"cannot divide {micro_batches} micro-batches per update into {rounds} rounds of equal size "
            f"(micro-batches // pipeline stages = {micro_batches} // {stages})"
        )
    return None


def most_passes_in_flight(
    schedule: ScheduleName, *, stage: int, stages: int, chunks: int, micro_batches: int
) -> int:
    """Return the most forward passes of a stage's chunks whose backward passes are outstanding."""
    after = stages - stage
    if schedule == "zbv":
        first = 2 * after - 1 + stage
        return min(first + stages, 2 * micro_batches)
    if schedule == "1f1b" or (chunks == 1 and schedule == "zero_bubble"):
        return min(after, micro_batches)
    per_round = micro_batches // max(1, micro_batches // stages)
    factor = 2 if schedule == "interleaved" else 1
    warmup = (chunks - 1) * per_round + factor * (after - 1)
    return min(warmup + 1, chunks * micro_batches)


def idle_share(
    schedule: ScheduleName,
    *,
    stages: int,
    chunks: int,
    micro_batches: int,
    forward: float = 1.0,
    activations: float = 1.0,
    weights: float = 1.0,
) -> float:
    """Return the fraction of the time of an update that a stage is idle, from its first pass to its last.

    Messages take no time. Sources: arXiv:2104.04473, section 2.2 (1F1B, interleaved); arXiv:2401.10241,
    table 2 (zero bubble). ZBV has no idle time between its passes if the three times are equal; what is left
    is the start of the last stage. This holds from twice as many micro-batches as stages.

    Args:
        schedule: name of the schedule.
        stages: pipeline stages.
        chunks: chunks per stage.
        micro_batches: micro-batches per update.
        forward: time of a stage's forward pass of a micro-batch, all chunks together.
        activations: time of the gradients of its activations.
        weights: time of the gradients of its weights.
    """
    busy = forward + activations + weights
    waits: Mapping[ScheduleName, float] = {
        "1f1b": busy,
        "interleaved": busy / chunks,
        "zero_bubble": (forward + activations - weights) / chunks,
        "zbv": max(forward, activations) / chunks,
    }
    idle = (stages - 1) * waits[schedule]
    return idle / (micro_batches * busy + idle)
