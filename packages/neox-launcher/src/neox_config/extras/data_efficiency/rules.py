"""Rules about curriculum learning and random layer-wise token dropping (random-LTD)."""

from collections.abc import Iterator, Mapping
from itertools import pairwise

from neox_config.derive.attention_layers import types_in
from neox_config.extras.data_efficiency.curricula import METRICS, enabled_sampling
from neox_config.extras.data_efficiency.fields import TRUNCATES, Metric, ScheduleConfig
from neox_config.facts.attention import BIASED_SCORES
from neox_config.pluralize import pluralize
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig

_NEEDED: Mapping[str, tuple[str, ...]] = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


def token_dropping_names_its_layers(c: NeoXConfig) -> Iterator[Problem]:
    """Require the number of listed layers to match random_ltd_layer_num and total_layer_num."""
    name = "data_efficiency.data_routing.random_ltd"
    ltd = c.data_efficiency.data_efficiency.data_routing.random_ltd
    count, listed, total = ltd.random_ltd_layer_num, ltd.random_ltd_layer_id, ltd.total_layer_num
    if count is not None and listed is not None and len(listed) != count:
        what = f"lists {pluralize(len(listed), 'layer')}, but random_ltd_layer_num is {count}"
        yield Problem(f"{name}.random_ltd_layer_id", what, f"list {pluralize(count, 'layer')}")
    if count is not None and total is not None and count > total:
        what = f"is more than total_layer_num: {total}"
        yield Problem(f"{name}.random_ltd_layer_num", what, f"use at most {total}")


def token_dropping_fits_the_model(c: NeoXConfig) -> Iterator[Problem]:
    """Require existing layers with global attention, and settings that random-LTD supports."""
    efficiency = c.data_efficiency.data_efficiency
    routing = efficiency.data_routing
    if not (efficiency.enabled and routing.enabled and routing.random_ltd.enabled):
        return
    name = "data_efficiency.data_routing.random_ltd"
    listed, layers = routing.random_ltd.random_ltd_layer_id or (), c.model.num_layers
    if routing.random_ltd.total_layer_num not in (None, layers):
        yield Problem(f"{name}.total_layer_num", f"must equal num-layers: {layers}", f"use {layers}")
    if len(set(listed)) < len(listed) or not all(0 <= index < layers for index in listed):
        what = f"must list distinct layers from 0 to {layers - 1}"
        yield Problem(f"{name}.random_ltd_layer_id", what, "list each layer once")
    unsupported = {
        f"pos-emb: {c.attention.pos_emb}": c.attention.pos_emb in BIASED_SCORES,
        "attention types other than global": not types_in(c) <= {"global"},
        "sequence-parallel": c.parallelism.sequence_parallel,
        "rope-fusion: true": c.attention.rope_fusion is True,
        "num-unique-layers": c.model.num_unique_layers is not None,
    }
    for setting, is_used in unsupported.items():
        if is_used:
            yield Problem(f"{name}.enabled", f"does not work with {setting}", "remove one of them")


def curricula_choose_samples_or_cut_them(c: NeoXConfig) -> Iterator[Problem]:
    """Require supported combinations of clustering_type and difficulty_type for each metric."""
    sampling = enabled_sampling(c.data_efficiency)
    if sampling is None:
        return
    for key, metric in sampling.curriculum_learning.curriculum_metrics.items():
        yield from _measure(f"{METRICS}.{key}", metric, cuts=key == TRUNCATES)


def _measure(name: str, metric: Metric, *, cuts: bool) -> Iterator[Problem]:
    if cuts and metric.clustering_type != "single_cluster":
        what = "selects samples, but this metric truncates them"
        yield Problem(f"{name}.clustering_type", what, "use single_cluster")
    if metric.difficulty_type == "percentile" and metric.min_difficulty == metric.max_difficulty == 0:
        what = "is the difficulty at which all samples are drawn, so it must be at least 1"
        yield Problem(f"{name}.max_difficulty", what, "use 100 for percentiles")


def curricula_cut_to_lengths_that_there_are(c: NeoXConfig) -> Iterator[Problem]:
    """Require a single schedule of sample lengths, with lengths from 1 to seq-length."""
    longest, legacy = c.model.seq_length, c.data_efficiency.curriculum_learning
    if legacy.enabled and (legacy.max_difficulty or 0) > longest:
        what = f"is longer than seq-length: {longest:,}"
        yield Problem("curriculum_learning.max_difficulty", what, f"use at most {longest:,}")
    sampling = enabled_sampling(c.data_efficiency)
    metric = sampling and sampling.curriculum_learning.curriculum_metrics.get(TRUNCATES)
    if not metric:
        return
    if metric.max_difficulty > longest or metric.min_difficulty < 1 or metric.difficulty_type != "value":
        what = f"must be a length in tokens, at most seq-length: {longest:,}"
        remedy = f"use difficulty_type: value, with difficulties from 1 to {longest:,}"
        yield Problem(f"{METRICS}.{TRUNCATES}.max_difficulty", what, remedy)
    if legacy.enabled:
        what = f"sets the length of samples, and so does the metric {TRUNCATES}"
        yield Problem("curriculum_learning.enabled", what, "remove one of them")


def curricula_grow_as_their_schedule_says(c: NeoXConfig) -> Iterator[Problem]:
    """Require the parameters of each schedule, and listed difficulties that increase."""
    legacy = c.data_efficiency.curriculum_learning
    if legacy.enabled:
        yield from _difficulty_schedule("curriculum_learning", legacy.schedule_type, legacy.schedule_config)
    metrics = c.data_efficiency.data_efficiency.data_sampling.curriculum_learning.curriculum_metrics
    for key, metric in metrics.items():
        yield from _difficulty_schedule(f"{METRICS}.{key}", metric.schedule_type, metric.schedule_config)


def _difficulty_schedule(name: str, schedule: str | None, config: ScheduleConfig) -> Iterator[Problem]:
    for needed in _NEEDED[schedule or "custom"]:
        if getattr(config, needed) is None:
            what = f"is required by schedule_type: {schedule}"
            yield Problem(f"{name}.schedule_config.{needed}", what, f"add {needed}: ...", value="")
    for rising in ("difficulty", "max_step"):
        values = getattr(config, rising) or ()
        if any(later <= earlier for earlier, later in pairwise(values)):
            yield Problem(
                f"{name}.schedule_config.{rising}", "must be strictly increasing", "give increasing numbers"
            )
    if config.difficulty is None or config.max_step is None:
        return
    if len(config.max_step) != len(config.difficulty) - 1:
        entries = pluralize(len(config.max_step), "entry", "entries")
        what = f"has {entries} for {pluralize(len(config.difficulty), 'difficulty', 'difficulties')}"
        remedy = "give one entry fewer than difficulties; the last difficulty has no end"
        yield Problem(f"{name}.schedule_config.max_step", what, remedy)
