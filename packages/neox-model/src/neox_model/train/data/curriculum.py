"""Build the order of samples of a curriculum from configuration. Without torch."""

from collections.abc import Mapping

from neox_config.counted import counted
from neox_config.derive.curricula import (
    NO_DIFFICULTIES,
    difficulty_schedule,
    enabled_curriculum,
)
from neox_config.facts.difficulty import DifficultySchedule
from neox_config.schema.sections.data_efficiency import Curriculum, DataEfficiencySection
from neox_data.batch_sizes import BatchSizes
from neox_data.blend import SampleDataset
from neox_data.curriculum.dataset import CurriculumDataset, load_or_build_clusters
from neox_data.curriculum.metric_index import MetricIndex
from neox_data.errors import DataError
from neox_model.train.data.position import Position

__all__ = ["drawn_by_difficulty"]


def drawn_by_difficulty(
    section: DataEfficiencySection,
    dataset: SampleDataset,
    position: Position,
    *,
    iterations: int,
    batch: int,
    difficulties: Mapping[str, DifficultySchedule] = NO_DIFFICULTIES,
) -> SampleDataset:
    """Return the training samples in the order of the configured curriculum; unchanged without one.

    The difficulty increases at given iterations, so the samples drawn depend on the batch sizes of all
    earlier iterations. A checkpoint records these, so that a training resumes at the next sample with any
    batch size. A checkpoint of an earlier version records one batch size; if this does not match its number
    of samples, the samples drawn are unknown.

    Args:
        section: the curricula.
        dataset: the training samples.
        position: position in the data from which the training resumes.
        iterations: updates of the training.
        batch: samples per update over all devices.
        difficulties: the schedules of custom curricula, by the name of their block.

    Raises:
        DataError: an analysis is missing, damaged, of other data or of another order; or the batch sizes of
            the iterations before `position` are unknown.
    """
    curriculum = enabled_curriculum(section)
    indices = {} if curriculum is None else _indices(curriculum, difficulties)
    if curriculum is None or not indices:
        return dataset
    if not position.knows_batch_sizes:
        raise DataError(
            f"the checkpoint's training read {counted(position.samples, 'sample')} in "
            f"{counted(position.iteration, 'iteration')} but does not record the batch sizes, so the "
            "remaining samples of the curriculum are "
            "unknown; set finetune: true to start the curriculum again, or "
            "data_efficiency.data_sampling.curriculum_learning.enabled: false to continue without it"
        )
    batch_sizes = BatchSizes(position.batch_sizes).then(position.iteration, batch)
    assert curriculum.data_cluster_path is not None, "needed when the block is enabled"
    clusters = load_or_build_clusters(
        indices, dataset, iterations=iterations, folder=curriculum.data_cluster_path
    )
    efficiency = section.data_efficiency
    return CurriculumDataset(
        dataset,
        clusters,
        batch_sizes=batch_sizes,
        num_samples=max(position.samples, batch_sizes.first_item(iterations)),
        num_epochs=efficiency.data_sampling.num_epochs,
        seed=efficiency.seed,
    )


def _indices(
    curriculum: Curriculum, difficulties: Mapping[str, DifficultySchedule]
) -> dict[str, MetricIndex]:
    """Return the analysis of each metric whose difficulty increases by a schedule."""
    return {
        name: MetricIndex(
            samples=metric.index_to_sample_path,
            difficulties=metric.index_to_metric_path,
            kind=metric.difficulty_type,
            largest=metric.max_difficulty,
            schedule=difficulty_schedule(metric, difficulties.get(name)),
        )
        for name, metric in curriculum.curriculum_metrics.items()
        if metric.clustering_type == "schedule_based"
    }
