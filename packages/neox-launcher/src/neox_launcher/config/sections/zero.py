"""ZeRO: what data-parallel ranks share instead of each holding a copy."""

from typing import Literal

from neox_launcher.config.parameter import Section, block, param

__all__ = ["OffloadOptimizer", "OffloadParam", "ZeroOptimization", "ZeroSection"]

_STAGE_3 = "stage is 3"


class OffloadParam(Section):
    """Where parameters wait while they are not needed."""

    device: Literal["none", "cpu", "nvme"] = param(
        "none", origin="DSC", doc="Where parameters live; nvme needs libaio."
    )
    nvme_path: str | None = param(
        None, origin="DSC", none_means="not given; nvme needs it", used_when="device is nvme", doc="Folder."
    )
    pin_memory: bool = param(
        False, origin="DSC", doc="Use page-locked host memory: faster, but never swapped out."
    )
    buffer_count: int = param(5, origin="DSC", ge=0, used_when="device is nvme", doc="Transfer buffers.")
    buffer_size: int = param(
        100_000_000, origin="DSC", ge=0, used_when="device is nvme", doc="Elements of each transfer buffer."
    )
    max_in_cpu: int = param(
        1_000_000_000, origin="DSC", ge=0, used_when="device is nvme", doc="Elements kept in host memory."
    )


class OffloadOptimizer(Section):
    """Where the optimizer's states live; the update is computed on the CPU then."""

    device: Literal["none", "cpu", "nvme"] = param(
        "none", origin="DSC", doc="Where optimizer states live; nvme needs libaio."
    )
    nvme_path: str | None = param(
        None, origin="DSC", none_means="not given; nvme needs it", used_when="device is nvme", doc="Folder."
    )
    pin_memory: bool = param(
        False, origin="DSC", doc="Use page-locked host memory: faster, but never swapped out."
    )
    ratio: float = param(
        1.0, origin="DSC", ge=0, le=1, used_when=_STAGE_3, doc="Part of the states that moves."
    )
    buffer_count: int = param(4, origin="DSC", ge=0, used_when="device is nvme", doc="Transfer buffers.")
    fast_init: bool = param(
        False, origin="DSC", used_when="device is nvme", doc="Start the optimizer faster."
    )


class ZeroOptimization(Section):
    """What is shared, and how it is communicated; sizes are in elements."""

    stage: Literal[0, 1, 2, 3] = param(
        0,
        origin="DSC",
        source="arXiv:1910.02054",
        doc="What data-parallel ranks share: 0 nothing, 1 optimizer states, 2 also gradients, 3 also "
        "parameters.",
    )
    allgather_partitions: bool = param(
        True, origin="DSC", doc="Not used: updated parameters are always collected by all-gather."
    )
    allgather_bucket_size: int = param(500_000_000, origin="DSC", ge=0, doc="Elements gathered at a time.")
    overlap_comm: bool | None = param(
        None,
        origin="DSC",
        none_means="true in stage 3, else false",
        doc="Reduce gradients during the backward pass.",
    )
    reduce_scatter: bool = param(
        True, origin="DSC", doc="Reduce each part to its owner instead of to every rank."
    )
    reduce_bucket_size: int = param(500_000_000, origin="DSC", gt=0, doc="Elements reduced at a time.")
    contiguous_gradients: bool = param(
        True, origin="DSC", doc="Gather gradients in one buffer as they come, against fragmented memory."
    )
    load_from_fp32_weights: bool = param(
        True, origin="DSC", doc="Not used: checkpoints hold the float32 weights where there are any."
    )
    grad_hooks: bool = param(
        True, origin="DSC", used_when="stage is 1", doc="Reduce during the backward pass."
    )
    round_robin_gradients: bool = param(
        False,
        origin="DSC",
        used_when="stage is 1 or 2",
        doc="Spread the copying of gradients to the host over ranks.",
    )
    offload_param: OffloadParam = block(
        OffloadParam, origin="DSC", doc="Parameters outside the device; stage 3."
    )
    offload_optimizer: OffloadOptimizer = block(
        OffloadOptimizer, origin="DSC", doc="Optimizer states outside the device."
    )
    stage3_max_live_parameters: int = param(
        1_000_000_000, origin="DSC", ge=0, used_when=_STAGE_3, doc="Parameters that a device keeps at most."
    )
    stage3_max_reuse_distance: int = param(
        1_000_000_000,
        origin="DSC",
        ge=0,
        used_when=_STAGE_3,
        doc="Keep a parameter that is needed again this soon.",
    )
    stage3_prefetch_bucket_size: int = param(
        50_000_000, origin="DSC", ge=0, used_when=_STAGE_3, doc="Parameters fetched ahead."
    )
    stage3_param_persistence_threshold: int = param(
        100_000, origin="DSC", ge=0, used_when=_STAGE_3, doc="Smaller parameters are not shared out."
    )
    sub_group_size: int = param(
        1_000_000_000,
        origin="DSC",
        ge=0,
        used_when=_STAGE_3,
        doc="Elements that the optimizer handles at a time.",
    )
    elastic_checkpoint: bool = param(
        False, origin="DSC", doc="Not used: every checkpoint can be loaded with any number of ranks."
    )
    stage3_gather_16bit_weights_on_model_save: bool = param(
        False,
        origin="DSC",
        used_when=_STAGE_3,
        doc="Not used: checkpoints hold whole weights, whatever the stage.",
    )
    ignore_unused_parameters: bool = param(
        True, origin="DSC", used_when="stage is 2", doc="Accept parameters that got no gradient."
    )
    zero_hpz_partition_size: int = param(
        1,
        origin="DSC",
        ge=1,
        used_when=_STAGE_3,
        source="arXiv:2306.10209",
        doc="Ranks of a second, nearer partition of the parameters; 1 is off, best is the devices of a host.",
    )
    zero_quantized_weights: bool = param(
        False, origin="DSC", resume="training", source="arXiv:2306.10209", doc="Gather weights in eight bits."
    )
    zero_quantized_gradients: bool = param(
        False,
        origin="DSC",
        resume="training",
        source="arXiv:2306.10209",
        doc="Reduce gradients in fewer bits.",
    )


class ZeroSection(Section, resume="free"):
    """ZeRO."""

    zero_optimization: ZeroOptimization = block(
        ZeroOptimization, origin="DSC", doc="What data-parallel ranks share instead of each holding a copy."
    )
