"""The chunks of pipeline stages, and the micro-batches that their schedule can run."""

from collections.abc import Iterator

from neox_config.derive.engine import chosen_engine, uses_pipeline
from neox_config.facts.pipeline_schedules import SCHEDULES, why_not_micro_batches
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig

__all__ = ["chunks_per_stage", "runs_torch_pipeline", "splits_backward", "unsuitable_micro_batches"]


def runs_torch_pipeline(config: NeoXConfig) -> bool:
    """Return True if the pipeline runs on the torch engine."""
    return uses_pipeline(config) and chosen_engine(config).name == "torch"


def splits_backward(config: NeoXConfig) -> bool:
    """Return True if a pipeline computes the gradients of weights apart from those of activations."""
    return uses_pipeline(config) and SCHEDULES[config.parallelism.pipeline_schedule].splits_backward


def chunks_per_stage(config: NeoXConfig) -> int:
    """Return the number of chunks of the model on each pipeline stage."""
    parallelism = config.parallelism
    return parallelism.virtual_pipeline_stages or SCHEDULES[parallelism.pipeline_schedule].chunks


def unsuitable_micro_batches(config: NeoXConfig, accumulation: int) -> Iterator[Problem]:
    """Yield a problem if the schedule cannot run the micro-batches of an update."""
    if not runs_torch_pipeline(config):
        return
    schedule, stages = config.parallelism.pipeline_schedule, config.parallelism.pipe_parallel_size
    reason = why_not_micro_batches(schedule, stages=stages, micro_batches=accumulation)
    if reason is not None:
        suitable = -(-accumulation // stages) * stages
        yield Problem(
            "pipeline_schedule",
            reason,
            f"use {suitable} micro-batches per update (gradient-accumulation-steps), or fewer stages",
        )
