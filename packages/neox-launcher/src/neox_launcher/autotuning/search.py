"""Selects the candidates to try: their order, and the end of the trials of a ZeRO stage."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

from neox_config.schema.sections.autotuning import Autotuning
from neox_launcher.autotuning.results import Result
from neox_launcher.autotuning.space import Candidate, Experiment

__all__ = ["in_order", "search"]


def in_order(candidates: Sequence[Candidate], tuning: Autotuning, *, seed: int) -> list[list[Candidate]]:
    """Group candidates by ZeRO stage, the best estimate first, and order each group by the tuner type.

    Args:
        candidates: with ascending micro-batches within a stage.
        tuning: autotuning parameters.
        seed: random seed of the random tuner.
    """
    by_stage: dict[int, list[Candidate]] = {}
    for candidate in candidates:
        by_stage.setdefault(candidate.experiment.zero_stage, []).append(candidate)
    stages = sorted(
        by_stage.values(), key=lambda stage: max(one.merit(tuning.metric) for one in stage), reverse=True
    )
    tuners: dict[str, Callable[[list[Candidate]], list[Candidate]]] = {
        "gridsearch": list,
        "random": lambda stage: random.Random(seed).sample(stage, len(stage)),
        "model_based": lambda stage: sorted(stage, key=lambda one: one.merit(tuning.metric), reverse=True),
    }
    return [tuners[tuning.tuner_type](stage) for stage in stages]


def search(
    stages: Iterable[Sequence[Candidate]], tuning: Autotuning, attempt: Callable[[Experiment], Result]
) -> Iterator[Result]:
    """Try the candidates stage by stage, and yield each result when it is available.

    Args:
        stages: result of `in_order`.
        tuning: sets the maximum trials per stage, also without improvement.
        attempt: runs one trial.
    """
    for stage in stages:
        yield from _search_stage(stage, tuning, attempt)


def _search_stage(
    stage: Sequence[Candidate], tuning: Autotuning, attempt: Callable[[Experiment], Result]
) -> Iterator[Result]:
    """Try the candidates of one stage; refused ones and those left out do not count as trials."""
    trials = without_better = 0
    best = float("-inf")
    too_large: dict[Experiment, int] = {}
    for experiment in (candidate.experiment for candidate in stage):
        if trials == tuning.tuner_num_trials or without_better == tuning.tuner_early_stopping:
            return
        limit = too_large.get(experiment.kind)
        if limit is not None and experiment.micro_batch >= limit:
            reason = f"micro-batch {limit} was out of memory"
            yield Result(experiment=experiment, status="left out", reason=reason)
            continue
        result = attempt(experiment)
        yield result
        if result.status == "refused":
            continue
        if result.status == "out of memory":
            too_large[experiment.kind] = experiment.micro_batch
        merit, trials = result.merit(tuning.metric), trials + 1
        without_better = 0 if merit > best else without_better + 1
        best = max(best, merit)
