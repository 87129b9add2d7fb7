"""How the model is spread over devices."""

from typing import Literal

from neox_launcher.config.parameter import Section, param

__all__ = ["ParallelismSection"]


class ParallelismSection(Section, resume="free"):
    """Pipeline and tensor (model) parallel sizes; what remains of the devices is data parallel."""

    pipe_parallel_size: int = param(
        0,
        origin="Meg",
        ge=0,
        doc="Pipeline stages. 0 is the plain model; 1 is the pipeline engine with a single stage.",
    )
    model_parallel_size: int = param(
        1, origin="Meg", ge=0, doc="Devices that share each layer's matrices (tensor parallelism); 0 means 1."
    )
    sequence_parallel: bool = param(
        False,
        origin="ours",
        source="arXiv:2205.05198",
        used_when="model_parallel_size >= 2",
        doc="Share out norms, dropout and residuals over the tensor-parallel devices, too, along the "
        "sequence: less memory for activations, as much communication.",
    )
    pipe_partition_method: str = param(
        "type:transformer|mlp",
        origin="NeoX",
        pattern=r"^(?i:parameters|uniform|type:.+)$",
        free_choice="parameters, uniform or type:REGEX",
        used_when="pipe_parallel_size >= 1",
        doc="How layers are dealt to stages: equal parameters, equal layer counts, or equal counts "
        "of the layers "
        "whose class name matches REGEX.",
    )
    distributed_backend: Literal["nccl", "gloo", "mpi"] | None = param(
        None,
        origin="Meg",
        none_means="nccl with GPUs, gloo without",
        doc="The communication library under torch.distributed.",
    )
    lazy_mpu_init: bool = param(
        False,
        origin="Meg",
        doc="For programs that form the parallel groups themselves; here they are formed as ever, and it "
        "means use-cpu-initialization.",
    )
