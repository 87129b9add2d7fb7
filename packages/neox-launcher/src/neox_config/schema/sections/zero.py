"""ZeRO: partitioning of model states across data-parallel ranks."""

from typing import Literal

from neox_config.schema.parameter import Section, block, param
from neox_config.schema.paths import PathText

__all__ = ["OffloadOptimizer", "OffloadParam", "ZeroOptimization", "ZeroSection"]

_STAGE_3 = "stage is 3"


class OffloadParam(Section):
    """Offloading of parameters to host memory or NVMe."""

    device: Literal["none", "cpu", "nvme"] = param(
        "none", origin="DSC", doc="Device to offload parameters to; nvme requires libaio."
    )
    nvme_path: PathText | None = param(
        None,
        origin="DSC",
        none_means="not set; required with nvme",
        used_when="device is nvme",
        doc="Directory on the NVMe device.",
    )
    pin_memory: bool = param(
        False, origin="DSC", doc="Use page-locked host memory: faster, but it cannot be swapped out."
    )
    buffer_count: int = param(
        5, origin="DSC", ge=0, used_when="device is nvme", doc="Number of transfer buffers."
    )
    buffer_size: int = param(
        100_000_000,
        origin="DSC",
        ge=0,
        used_when="device is nvme",
        doc="Size of each transfer buffer, in elements.",
    )
    max_in_cpu: int = param(
        1_000_000_000,
        origin="DSC",
        ge=0,
        used_when="device is nvme",
        doc="Maximum number of elements kept in host memory.",
    )


class OffloadOptimizer(Section):
    """Offloading of optimizer states to host memory or NVMe; the update is then computed on the CPU."""

    device: Literal["none", "cpu", "nvme"] = param(
        "none", origin="DSC", doc="Device to offload optimizer states to; nvme requires libaio."
    )
    nvme_path: PathText | None = param(
        None,
        origin="DSC",
        none_means="not set; required with nvme",
        used_when="device is nvme",
        doc="Directory on the NVMe device.",
    )
    pin_memory: bool = param(
        False, origin="DSC", doc="Use page-locked host memory: faster, but it cannot be swapped out."
    )
    ratio: float = param(
        1.0,
        origin="DSC",
        ge=0,
        le=1,
        used_when="device is not none",
        doc="Fraction of the optimizer states to offload; only 1 is possible.",
    )
    buffer_count: int = param(
        4, origin="DSC", ge=0, used_when="device is nvme", doc="Number of transfer buffers."
    )
    fast_init: bool = param(
        False, origin="DSC", used_when="device is nvme", doc="Use fast initialization of the optimizer."
    )


class ZeroOptimization(Section):
    """Partitioning and communication settings of ZeRO; sizes are in elements."""

    stage: Literal[0, 1, 2, 3] = param(
        0,
        origin="DSC",
        source="arXiv:1910.02054",
        doc="ZeRO stage. 0: no partitioning; 1: partition optimizer states across data-parallel ranks; 2: "
        "also gradients; 3: also parameters.",
    )
    allgather_partitions: bool = param(
        True, origin="DSC", doc="Not used: updated parameters are always collected with all-gather."
    )
    allgather_bucket_size: int = param(
        500_000_000, origin="DSC", ge=0, doc="Number of elements per all-gather."
    )
    overlap_comm: bool | None = param(
        None,
        origin="DSC",
        none_means="true in stage 3, and on GPUs in stage 0 with the torch engine; else false",
        doc="Overlap the reduction of gradients with the backward pass.",
    )
    reduce_scatter: bool = param(
        True, origin="DSC", doc="Use reduce-scatter instead of all-reduce to average gradients."
    )
    reduce_bucket_size: int = param(500_000_000, origin="DSC", gt=0, doc="Number of elements per reduction.")
    contiguous_gradients: bool = param(
        True,
        origin="DSC",
        doc="Copy gradients into a contiguous buffer as they are produced, to avoid memory fragmentation.",
    )
    load_from_fp32_weights: bool = param(
        True, origin="DSC", doc="Not used: checkpoints always contain the float32 weights if there are any."
    )
    grad_hooks: bool = param(
        True,
        origin="DSC",
        used_when="stage is 1",
        doc="Not used: the engine chooses whether stage 1 reduces gradients during or after the backward "
        "pass.",
    )
    round_robin_gradients: bool = param(
        False,
        origin="DSC",
        used_when="stage is 1 or 2",
        doc="Distribute the copying of gradients to host memory across ranks.",
    )
    offload_param: OffloadParam = block(
        OffloadParam, origin="DSC", doc="Offloading of parameters; requires stage 3."
    )
    offload_optimizer: OffloadOptimizer = block(
        OffloadOptimizer, origin="DSC", doc="Offloading of optimizer states."
    )
    stage3_max_live_parameters: int = param(
        1_000_000_000,
        origin="DSC",
        ge=0,
        used_when=_STAGE_3,
        doc="Maximum number of parameters resident on a device before they are released.",
    )
    stage3_max_reuse_distance: int = param(
        1_000_000_000,
        origin="DSC",
        ge=0,
        used_when=_STAGE_3,
        doc="Do not release a parameter that is used again within this number of parameters.",
    )
    stage3_prefetch_bucket_size: int = param(
        50_000_000, origin="DSC", ge=0, used_when=_STAGE_3, doc="Maximum number of parameters to prefetch."
    )
    stage3_param_persistence_threshold: int = param(
        100_000, origin="DSC", ge=0, used_when=_STAGE_3, doc="Do not partition parameters smaller than this."
    )
    sub_group_size: int = param(
        1_000_000_000,
        origin="DSC",
        ge=0,
        used_when=_STAGE_3,
        doc="Number of elements that the optimizer updates at a time.",
    )
    elastic_checkpoint: bool = param(
        False, origin="DSC", doc="Not used: every checkpoint loads with any number of ranks."
    )
    stage3_gather_16bit_weights_on_model_save: bool = param(
        False,
        origin="DSC",
        used_when=_STAGE_3,
        doc="Not used: checkpoints contain whole weights in every stage.",
    )
    ignore_unused_parameters: bool = param(
        True, origin="DSC", used_when="stage is 2", doc="Allow parameters that received no gradient."
    )
    zero_hpz_partition_size: int = param(
        1,
        origin="DSC",
        ge=1,
        used_when=_STAGE_3,
        source="arXiv:2306.10209",
        doc="Size of the secondary partition group of parameters (hpZ); 1 disables it. Best set to the "
        "number of devices per host. Not with tensor or pipeline parallelism.",
    )
    zero_quantized_weights: bool = param(
        False,
        origin="DSC",
        resume="training",
        source="arXiv:2306.10209",
        doc="Quantize weights to 8 bits for the all-gather (qwZ). Requires NVIDIA GPUs and DeepSpeed's "
        "operator quantizer.",
    )
    zero_quantized_gradients: bool = param(
        False,
        origin="DSC",
        resume="training",
        source="arXiv:2306.10209",
        doc="Refused: DeepSpeed's quantized reduction (qgZ) gives wrong gradients.",
    )


class ZeroSection(Section, resume="free"):
    """ZeRO: partitioning of model states across data-parallel ranks."""

    zero_optimization: ZeroOptimization = block(
        ZeroOptimization, origin="DSC", doc="Partitioning of model states across data-parallel ranks."
    )
