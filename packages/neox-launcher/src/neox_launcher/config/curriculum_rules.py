"""Rules of curricula: what is enabled has an effect, and one that can be had."""

from collections.abc import Iterator

from neox_launcher.config.problems import Problem
from neox_launcher.config.schema import NeoXConfig
from neox_launcher.config.sections.data_efficiency import TRUNCATES, DataSampling, Metric

__all__ = [
    "curricula_choose_samples_or_cut_them",
    "curricula_cut_to_lengths_that_there_are",
    "curricula_of_lengths",
]

_METRICS = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"


def curricula_choose_samples_or_cut_them(c: NeoXConfig) -> Iterator[Problem]:
    """Each measure chooses samples, or cuts them, in a way that can be carried out."""
    sampling = _sampling(c)
    if sampling is None:
        return
    for key, metric in sampling.curriculum_learning.curriculum_metrics.items():
        yield from _measure(f"{_METRICS}.{key}", metric, cuts=key == TRUNCATES)


def _measure(name: str, metric: Metric, *, cuts: bool) -> Iterator[Problem]:
    if cuts and metric.clustering_type != "single_cluster":
        what = "would choose samples, and this measure cuts them"
        yield Problem(f"{name}.clustering_type", what, "use single_cluster")
    if metric.difficulty_type == "percentile" and metric.max_difficulty > 100:
        yield Problem(f"{name}.max_difficulty", "is no percentile", "use at most 100")


def curricula_cut_to_lengths_that_there_are(c: NeoXConfig) -> Iterator[Problem]:
    """One schedule says how long samples are: at least one token, at most seq-length."""
    longest, legacy = c.model.seq_length, c.data_efficiency.curriculum_learning
    if legacy.enabled and (legacy.max_difficulty or 0) > longest:
        what = f"is longer than seq-length: {longest:,}"
        yield Problem("curriculum_learning.max_difficulty", what, f"use at most {longest:,}")
    sampling = _sampling(c)
    metric = sampling and sampling.curriculum_learning.curriculum_metrics.get(TRUNCATES)
    if not metric:
        return
    if metric.max_difficulty > longest or metric.min_difficulty < 1 or metric.difficulty_type != "value":
        what = f"is no length in tokens up to seq-length: {longest:,}"
        remedy = f"use difficulty_type: value, with difficulties from 1 to {longest:,}"
        yield Problem(f"{_METRICS}.{TRUNCATES}.max_difficulty", what, remedy)
    if legacy.enabled:
        what = f"says how long samples are, and so does the measure {TRUNCATES}"
        yield Problem("curriculum_learning.enabled", what, "leave one of them out")


def curricula_of_lengths(c: NeoXConfig) -> list[str]:
    """The enabled blocks that say how long samples are."""
    sampling = _sampling(c)
    found = ["curriculum_learning"] if c.data_efficiency.curriculum_learning.enabled else []
    if sampling is not None and sampling.curriculum_learning.enabled:
        found += [f"{_METRICS}.{TRUNCATES}"] * (TRUNCATES in sampling.curriculum_learning.curriculum_metrics)
    return found


def _sampling(c: NeoXConfig) -> DataSampling | None:
    efficiency = c.data_efficiency.data_efficiency
    return efficiency.data_sampling if efficiency.enabled and efficiency.data_sampling.enabled else None
