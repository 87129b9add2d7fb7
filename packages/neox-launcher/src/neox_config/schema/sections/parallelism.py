"""Pipeline, tensor and sequence parallelism."""

from typing import Literal

from neox_config.facts.pipeline_schedules import ScheduleName
from neox_config.schema.parameter import Section, param

__all__ = ["ParallelismSection"]


class ParallelismSection(Section, resume="free"):
    """Pipeline and tensor (model) parallel sizes; the remaining factor of the devices is data parallel."""

    pipe_parallel_size: int = param(
        0,
        origin="Meg",
        ge=0,
        le=10_000,
        doc="Number of pipeline stages. 0 and 1: no pipeline; only the engine deepspeed runs 1 as a pipeline "
        "of a single stage.",
    )
    model_parallel_size: int = param(
        1,
        origin="Meg",
        ge=0,
        le=10_000,
        doc="Tensor-parallel size: number of devices that split each layer's matrices; 0 means 1.",
    )
    expert_parallel_size: int = param(
        1,
        origin="ours",
        ge=1,
        le=10_000,
        used_when="moe_num_experts >= 2",
        source="arXiv:2006.16668",
        doc="Number of data-parallel devices that divide the experts of each layer among each other. Each "
        "sends its tokens to the devices with their experts, and receives the results. It divides the "
        "data-parallel size and moe-num-experts. ZeRO divides experts over the remaining factor of the "
        "data-parallel size.",
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
        used_when="pipe_parallel_size >= 2",
        doc="How layers are assigned to stages: parameters: equal numbers of parameters; uniform: equal "
        "numbers of layers; type:REGEX: equal numbers of the layers whose class name matches REGEX.",
    )
    pipeline_schedule: ScheduleName = param(
        "1f1b",
        origin="ours",
        source="arXiv:2006.09503, 2104.04473, 2401.10241",
        used_when="pipe_parallel_size >= 2",
        doc="Order of the forward and backward passes of pipeline stages. 1f1b: each stage runs one forward, "
        "then one backward pass, and is idle for (stages - 1) / micro-batches of its busy time; interleaved: "
        "several chunks of the model per stage (virtual_pipeline_stages) divide this by their number, for as "
        "many times the messages; zero_bubble: the gradients of weights fill two thirds of the idle time, "
        "for more memory and smaller operations; zbv: the same with two chunks per stage, visited forth and "
        "back, for the least idle time. All but 1f1b run on the torch engine.",
    )
    virtual_pipeline_stages: int | None = param(
        None,
        origin="ours",
        source="arXiv:2104.04473",
        ge=1,
        le=10_000,
        none_means="2 with interleaved and zbv, else 1",
        used_when="pipeline_schedule is interleaved, zero_bubble or zbv",
        doc="Chunks of the model per pipeline stage. zbv has 2.",
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
