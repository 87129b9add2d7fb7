"""Rules about elastic jobs."""

from collections.abc import Iterator

from neox_launcher.config.problems import Problem
from neox_launcher.config.schema import NeoXConfig


def elastic_sizes_are_in_order(c: NeoXConfig) -> Iterator[Problem]:
    """The most is not less than the fewest, and a micro-batch is no larger than the batch."""
    elastic = c.elasticity.elasticity
    if elastic.max_gpus < elastic.min_gpus:
        what = f"is less than min_gpus: {elastic.min_gpus}"
        yield Problem("elasticity.max_gpus", what, f"use at least {elastic.min_gpus}")
    largest = max(elastic.micro_batch_sizes)
    if largest > elastic.max_train_batch_size:
        yield Problem(
            "elasticity.micro_batch_sizes",
            f"holds {largest:,}, more than max_train_batch_size: {elastic.max_train_batch_size:,}",
            "leave it out, or raise max_train_batch_size",
        )


def elastic_jobs_leave_batch_sizes_to_the_block(c: NeoXConfig) -> Iterator[Problem]:
    """The elastic block chooses the batch sizes, so nothing else says them."""
    elastic = c.elasticity.elasticity
    if not elastic.enabled or elastic.ignore_non_elastic_batch_info:
        return
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if getattr(c.training, name) is not None:
            yield Problem(
                name,
                "contradicts elasticity.enabled: true, which chooses the batch sizes",
                "leave it out, or set elasticity.ignore_non_elastic_batch_info: true",
            )


def elastic_jobs_have_one_copy_per_stage(c: NeoXConfig) -> Iterator[Problem]:
    """The block knows devices that share layers, as many as the model has, and no stages."""
    elastic, parallel = c.elasticity.elasticity, c.parallelism
    if elastic.enabled and parallel.pipe_parallel_size > 1:
        yield Problem("elasticity.enabled", "works only without pipeline stages", "set pipe-parallel-size: 0")
    given = "model_parallel_size" in elastic.model_fields_set
    if elastic.enabled and given and elastic.model_parallel_size != max(1, parallel.model_parallel_size):
        yield Problem(
            "elasticity.model_parallel_size",
            f"is not model-parallel-size: {parallel.model_parallel_size}",
            "leave it out: it follows",
        )
