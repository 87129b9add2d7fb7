"""Batch sizes that stay the same while the number of devices changes."""

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from neox_launcher.config.parameter import Section, block, param

__all__ = ["Elasticity", "ElasticitySection"]

_VERSIONS = (0.1, 0.2)


class Elasticity(Section):
    """One train-batch-size that as many numbers of devices as possible can share."""

    enabled: bool = param(
        False,
        origin="DSC",
        doc="Let this block choose the batch sizes; with --max-restarts a job goes on without a lost host.",
    )
    max_train_batch_size: int = param(
        2000, origin="DSC", gt=0, le=10**8, doc="Largest train-batch-size to choose."
    )
    micro_batch_sizes: tuple[int, ...] = param(
        (2, 4, 6),
        origin="DSC",
        min_length=1,
        max_length=32,
        doc="Micro-batch sizes that fit on a device.",
    )
    min_gpus: int = param(1, origin="DSC", ge=1, doc="Fewest devices to plan for.")
    max_gpus: int = param(10000, origin="DSC", ge=1, doc="Most devices to plan for.")
    min_time: int = param(
        0,
        origin="DSC",
        resume="free",
        ge=0,
        used_when="version is 0.1",
        doc="Not used: a job gets smaller when a host is lost, whenever that is.",
    )
    prefer_large_batch: bool = param(
        True, origin="DSC", doc="Of several batch sizes take the largest rather than the smallest."
    )
    ignore_non_elastic_batch_info: bool = param(
        False, origin="DSC", doc="Batch sizes outside this block are not used, instead of being an error."
    )
    version: float = param(0.2, origin="DSC", free_choice="0.1, 0.2", doc="Version of the rules of choice.")
    num_gpus_per_node: int = param(
        1,
        origin="DSC",
        ge=1,
        used_when="version is 0.2",
        doc="Devices of a host, by which jobs with model parallelism grow and shrink.",
    )
    model_parallel_size: int = param(
        1, origin="DSC", ge=1, used_when="version is 0.2", doc="Devices that share each layer."
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
    """Batch sizes for a number of devices that changes."""

    elasticity: Elasticity = block(
        Elasticity, origin="DSC", doc="One batch size for many numbers of devices."
    )
