"""Rules about elastic training."""

from collections.abc import Iterator

from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig


def micro_batches_fit_an_elastic_batch(c: NeoXConfig) -> Iterator[Problem]:
    """Require micro-batches no larger than max_train_batch_size."""
    elastic = c.elasticity.elasticity
    largest = max(elastic.micro_batch_sizes)
    if largest > elastic.max_train_batch_size:
        yield Problem(
            "elasticity.micro_batch_sizes",
            f"contains {largest:,}, which is more than max_train_batch_size: "
            f"{elastic.max_train_batch_size:,}",
            f"remove {largest:,}, or raise max_train_batch_size",
        )


def elastic_jobs_leave_batch_sizes_to_the_block(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse batch sizes outside the elasticity block, which chooses them."""
    elastic = c.elasticity.elasticity
    if not elastic.enabled or elastic.ignore_non_elastic_batch_info:
        return
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if getattr(c.training, name) is not None:
            yield Problem(
                name,
                "cannot be combined with elasticity.enabled: true, which chooses the batch sizes",
                "remove it, or set elasticity.ignore_non_elastic_batch_info: true",
            )


def elastic_jobs_have_one_copy_per_stage(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse elastic training with pipeline stages or with a different tensor-parallel size."""
    elastic, parallel = c.elasticity.elasticity, c.parallelism
    if elastic.enabled and parallel.pipe_parallel_size > 1:
        yield Problem(
            "elasticity.enabled", "does not work with pipeline parallelism", "set pipe-parallel-size: 0"
        )
    given = "model_parallel_size" in elastic.model_fields_set
    if elastic.enabled and given and elastic.model_parallel_size != max(1, parallel.model_parallel_size):
        yield Problem(
            "elasticity.model_parallel_size",
            f"must equal model-parallel-size: {parallel.model_parallel_size}",
            "remove it; model-parallel-size is used",
        )
