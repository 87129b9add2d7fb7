"""Pipeline, tensor and sequence parallelism."""

from typing import Literal

from neox_config.schema.parameter import Section, param

__all__ = ["ParallelismSection"]


class ParallelismSection(Section, resume="free"):
    """Pipeline and tensor (model) parallel sizes; the remaining factor of the devices is data parallel."""

    pipe_parallel_size: int = param(
        0,
        origin="Meg",
        ge=0,
        le=10_000,
        doc="Number of pipeline stages. 0 disables the pipeline engine; 1 uses it with a single stage.",
    )
    model_parallel_size: int = param(
        1,
        origin="Meg",
        ge=0,
        le=10_000,
        doc="Tensor-parallel size: number of devices that split each layer's matrices; 0 means 1.",
    )
    sequence_parallel: bool = param(
        False,
        origin="ours",
        source="arXiv:2205.05198",
        used_when="model_parallel_size >= 2",
        doc="Also split norms, dropout and residuals across the tensor-parallel devices, along the sequence "
        "dimension. Reduces activation memory at the same communication volume.",
    )
    pipe_partition_method: str = param(
        "type:transformer|mlp",
        origin="NeoX",
        pattern=r"^(?i:parameters|uniform|type:.+)$",
        free_choice="parameters, uniform or type:REGEX",
        used_when="pipe_parallel_size >= 1",
        doc="How layers are assigned to stages: parameters: equal numbers of parameters; uniform: equal "
        "numbers of layers; type:REGEX: equal numbers of the layers whose class name matches REGEX.",
    )
    distributed_backend: Literal["nccl", "gloo", "mpi"] | None = param(
        None,
        origin="Meg",
        none_means="nccl with GPUs, gloo without",
        doc="Backend of torch.distributed.",
    )
    lazy_mpu_init: bool = param(
        False,
        origin="Meg",
        doc="For programs that create the parallel groups themselves. Here the groups are always created, "
        "and it only implies use-cpu-initialization.",
    )
