"""From the blocks of curricula to schedules, and to the order in which samples are drawn. Without torch."""

from collections.abc import Callable
from typing import Any

from neox_data.blend import SampleDataset
from neox_data.curriculum.dataset import CurriculumDataset, load_or_build_clusters
from neox_data.curriculum.metric_index import MetricIndex
from neox_data.curriculum.pace import Pace, fixed_discrete, fixed_linear, fixed_root
from neox_data.errors import DataError
from neox_launcher.config import NeoXConfig, Resolved
from neox_launcher.config.sections.data_efficiency import TRUNCATES, Curriculum, CurriculumLearning, Metric
from neox_model.train.position import Position

__all__ = ["PACES", "drawn_by_difficulty", "length_pace", "prefetch_threads"]


def length_pace(config: NeoXConfig) -> Pace | None:
    """How many tokens of its samples each iteration predicts; None: all."""
    legacy = config.data_efficiency.curriculum_learning
    if legacy.enabled:
        return _pace(legacy)
    metrics = _metrics(config)
    return _pace(metrics[TRUNCATES]) if TRUNCATES in metrics else None


def prefetch_threads(config: NeoXConfig) -> int:
    """Threads that fetch training samples ahead."""
    efficiency = config.data_efficiency.data_efficiency
    if efficiency.enabled and efficiency.data_sampling.enabled:
        return efficiency.data_sampling.num_workers
    return config.data.num_workers


def drawn_by_difficulty(resolved: Resolved, dataset: SampleDataset, position: Position) -> SampleDataset:
    """The training samples in the order of the configured curriculum; as they are without one.

    Args:
        resolved: the configuration.
        dataset: the training samples.
        position: where the training resumes.

    Raises:
        DataError: an analysis is missing, damaged or of other data; or the iterations before `position` had
            another batch size, by which other samples were drawn.
    """
    config = resolved.config
    indices = {
        name: MetricIndex(
            samples=metric.index_to_sample_path,
            difficulties=metric.index_to_metric_path,
            kind=metric.difficulty_type,
            pace=_pace(metric),
        )
        for name, metric in _metrics(config).items()
        if metric.clustering_type == "schedule_based"
    }
    curriculum = _curriculum(config)
    if curriculum is None or not indices:
        return dataset
    iterations, batch = config.training.train_iters, resolved.derived.train_batch_size
    if position.samples != position.iteration * batch:
        raise DataError(
            f"the checkpoint's training read {position.samples:,} samples in {position.iteration:,} "
            f"iterations, and a curriculum that chooses samples cannot continue with {batch:,} in each; give "
            "the checkpoint's train-batch-size, or set finetune: true to begin the curriculum again"
        )
    assert curriculum.data_cluster_path is not None, "needed when the block is enabled"
    clusters = load_or_build_clusters(
        indices, num_samples=len(dataset), iterations=iterations, folder=curriculum.data_cluster_path
    )
    efficiency = config.data_efficiency.data_efficiency
    return CurriculumDataset(
        dataset,
        clusters,
        items_per_iteration=batch,
        num_samples=iterations * batch,
        num_epochs=efficiency.data_sampling.num_epochs,
        seed=efficiency.seed,
    )


def _curriculum(config: NeoXConfig) -> Curriculum | None:
    efficiency = config.data_efficiency.data_efficiency
    sampling = efficiency.data_sampling
    is_on = efficiency.enabled and sampling.enabled and sampling.curriculum_learning.enabled
    return sampling.curriculum_learning if is_on else None


def _metrics(config: NeoXConfig) -> dict[str, Metric]:
    curriculum = _curriculum(config)
    return {} if curriculum is None else curriculum.curriculum_metrics


def _pace(block: CurriculumLearning | Metric) -> Pace:
    return PACES[str(block.schedule_type)](block)


def _growth(block: Any) -> dict[str, Any]:
    return {
        "smallest": block.min_difficulty,
        "largest": block.max_difficulty,
        "iterations": block.schedule_config.total_curriculum_step,
        "multiple": block.schedule_config.difficulty_step,
    }


def _by_root(block: Any) -> Pace:
    return fixed_root(**_growth(block), degree=block.schedule_config.root_degree)


def _by_steps(block: Any) -> Pace:
    pace = block.schedule_config
    return fixed_discrete(difficulties=pace.difficulty, last_iterations=pace.max_step)


PACES: dict[str, Callable[[Any], Pace]] = {
    "fixed_linear": lambda block: fixed_linear(**_growth(block)),
    "fixed_root": _by_root,
    "fixed_discrete": _by_steps,
}
