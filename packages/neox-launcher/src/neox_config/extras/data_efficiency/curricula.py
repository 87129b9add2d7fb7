"""Enabled curricula, how they grow, and those that set the length of samples."""

from collections.abc import Mapping
from typing import Any

from neox_config.errors import ConfigError
from neox_config.extras.data_efficiency.difficulty import DifficultySchedule, fixed_discrete, fixed_root
from neox_config.extras.data_efficiency.fields import (
    TRUNCATES,
    Curriculum,
    CurriculumLearning,
    DataEfficiencySection,
    DataSampling,
    Metric,
)

__all__ = [
    "CUSTOM",
    "LEGACY",
    "METRICS",
    "NO_DIFFICULTIES",
    "curricula_of_lengths",
    "custom_curricula",
    "difficulty_schedule",
    "drawn_difficulties",
    "enabled_curriculum",
    "enabled_metrics",
    "enabled_sampling",
    "length_schedule",
]

LEGACY = "curriculum_learning"
CUSTOM = "custom"
NO_DIFFICULTIES: Mapping[str, DifficultySchedule] = {}
METRICS = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"


def curricula_of_lengths(section: DataEfficiencySection) -> list[str]:
    """Return the names of the enabled blocks that set the length of samples."""
    found = [LEGACY] if section.curriculum_learning.enabled else []
    return found + [f"{METRICS}.{TRUNCATES}"] * (TRUNCATES in enabled_metrics(section))


def enabled_sampling(section: DataEfficiencySection) -> DataSampling | None:
    """Return the block data_sampling if it and the block around it are enabled, else None."""
    efficiency = section.data_efficiency
    return efficiency.data_sampling if efficiency.enabled and efficiency.data_sampling.enabled else None


def enabled_curriculum(section: DataEfficiencySection) -> Curriculum | None:
    """Return the curriculum of data_sampling if it and all blocks around it are enabled, else None."""
    sampling = enabled_sampling(section)
    is_on = sampling is not None and sampling.curriculum_learning.enabled
    return sampling.curriculum_learning if sampling is not None and is_on else None


def enabled_metrics(section: DataEfficiencySection) -> Mapping[str, Metric]:
    """Return the metrics of the enabled curriculum; empty without one."""
    curriculum = enabled_curriculum(section)
    return {} if curriculum is None else curriculum.curriculum_metrics


def length_schedule(
    section: DataEfficiencySection, difficulties: Mapping[str, DifficultySchedule] = NO_DIFFICULTIES
) -> DifficultySchedule | None:
    """Return the schedule of sequence lengths by iteration; None: always the whole length.

    Args:
        section: the curricula.
        difficulties: the schedules of custom curricula, by the name of their block.
    """
    legacy, metrics = section.curriculum_learning, enabled_metrics(section)
    if legacy.enabled:
        return difficulty_schedule(legacy, difficulties.get(LEGACY))
    if TRUNCATES not in metrics:
        return None
    return difficulty_schedule(metrics[TRUNCATES], difficulties.get(TRUNCATES))


def custom_curricula(section: DataEfficiencySection) -> dict[str, CurriculumLearning | Metric]:
    """Return the enabled blocks whose schedule is a function of a program, by name."""
    legacy = section.curriculum_learning
    blocks: dict[str, CurriculumLearning | Metric] = {**enabled_metrics(section)}
    if legacy.enabled:
        blocks[LEGACY] = legacy
    return {name: block for name, block in blocks.items() if block.schedule_type == CUSTOM}


def drawn_difficulties(section: DataEfficiencySection) -> dict[str, DifficultySchedule]:
    """Return the largest difficulty of samples that a curriculum draws, by metric; empty without one."""
    return {
        f"largest {name}": difficulty_schedule(metric)
        for name, metric in enabled_metrics(section).items()
        if metric.clustering_type == "schedule_based" and metric.schedule_type != CUSTOM
    }


def difficulty_schedule(
    block: CurriculumLearning | Metric, custom: DifficultySchedule | None = None
) -> DifficultySchedule:
    """Return the maximum difficulty of a curriculum by iteration.

    Args:
        block: the curriculum.
        custom: its schedule, if its `schedule_type` is custom.

    Raises:
        ConfigError: it is custom, and there is none.
    """
    if block.schedule_type == CUSTOM:
        if custom is None:
            raise ConfigError(
                "schedule_type: custom is a Python function, which a configuration cannot contain; use "
                "fixed_linear, fixed_root or fixed_discrete, or train with neox_model.Trainer"
            )
        return custom
    schedule: Any = block.schedule_config
    if block.schedule_type == "fixed_discrete":
        return fixed_discrete(difficulties=schedule.difficulty, last_iterations=schedule.max_step)
    degrees: dict[str | None, int] = {"fixed_linear": 1, "fixed_root": schedule.root_degree}
    growth: dict[str, Any] = {
        "smallest": block.min_difficulty,
        "largest": block.max_difficulty,
        "iterations": schedule.total_curriculum_step,
        "multiple": schedule.difficulty_step,
        "degree": degrees[block.schedule_type],
    }
    return fixed_root(**growth)
