"""Elastic training: a batch size that stays the same when the number of devices changes."""

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from neox_config.schema.parameter import Section, block, param

__all__ = ["Elasticity", "ElasticitySection"]

_VERSIONS = (0.1, 0.2)


class Elasticity(Section):
    """Elastic training: choose one train-batch-size that works with many device counts."""

    enabled: bool = param(
        False,
        origin="DSC",
        doc="Choose the batch sizes from this block. With --max-restarts, a job continues without a lost "
        "host.",
    )
    max_train_batch_size: int = param(2000, origin="DSC", gt=0, le=10**8, doc="Maximum train-batch-size.")
    micro_batch_sizes: tuple[int, ...] = param(
        (2, 4, 6),
        origin="DSC",
        min_length=1,
        max_length=32,
        doc="Micro-batch sizes to choose from; each must fit in device memory.",
    )
    min_gpus: int = param(1, origin="DSC", ge=1, doc="Minimum number of devices.")
    max_gpus: int = param(10000, origin="DSC", ge=1, le=100_000_000, doc="Maximum number of devices.")
    min_time: int = param(
        0,
        origin="DSC",
        resume="free",
        ge=0,
        used_when="version is 0.1",
        doc="Not used: a job shrinks whenever a host is lost.",
    )
    prefer_large_batch: bool = param(
        True, origin="DSC", doc="Of several possible batch sizes, choose the largest instead of the smallest."
    )
    ignore_non_elastic_batch_info: bool = param(
        False, origin="DSC", doc="Ignore batch sizes set outside this block instead of reporting an error."
    )
    version: float = param(
        0.2, origin="DSC", free_choice="0.1, 0.2", doc="Version of the selection algorithm."
    )
    num_gpus_per_node: int = param(
        1,
        origin="DSC",
        ge=1,
        le=1_024,
        used_when="version is 0.2",
        doc="Devices per host; with model parallelism, jobs grow and shrink by whole hosts.",
    )
    model_parallel_size: int = param(
        1, origin="DSC", ge=1, used_when="version is 0.2", doc="Tensor-parallel size."
    )

    @field_validator("version", mode="after")
    @classmethod
    def _is_known(cls, value: float) -> float:
        if value not in _VERSIONS:
            raise PydanticCustomError("neox", "must be 0.1 or 0.2")
        return value

    @field_validator("micro_batch_sizes", mode="after")
    @classmethod
    def _are_positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(size < 1 for size in value):
            raise PydanticCustomError("neox", "must be whole numbers, each at least 1")
        return value


class ElasticitySection(Section, resume="training"):
    """Elastic training: one batch size for a changing number of devices."""

    elasticity: Elasticity = block(Elasticity, origin="DSC", doc="One batch size for many device counts.")
