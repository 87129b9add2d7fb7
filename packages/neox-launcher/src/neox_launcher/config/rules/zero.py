"""Rules about ZeRO: what is offloaded where, and how gradients are reduced."""

from collections.abc import Iterator

from neox_launcher.config.problems import Problem
from neox_launcher.config.schema import NeoXConfig

_ADAM_STATES = 4


def offload_param_needs_stage_3(c: NeoXConfig) -> Iterator[Problem]:
    """Only stage 3 shares parameters, so only there can they live elsewhere."""
    zero = c.zero.zero_optimization
    if zero.offload_param.device != "none" and zero.stage != 3:
        yield Problem(
            "zero_optimization.offload_param.device", f"needs stage 3, not {zero.stage}", "set stage: 3"
        )


def offload_optimizer_needs_zero(c: NeoXConfig) -> Iterator[Problem]:
    """Optimizer states move in stages 1 to 3, to NVMe in stage 3 only."""
    zero = c.zero.zero_optimization
    name = "zero_optimization.offload_optimizer.device"
    if zero.offload_optimizer.device != "none" and zero.stage == 0:
        yield Problem(name, "needs ZeRO", "set stage: 1, 2 or 3")
    elif zero.offload_optimizer.device == "nvme" and zero.stage != 3:
        yield Problem(name, f"needs stage 3, not {zero.stage}", "set stage: 3, or device: cpu")


def offloading_says_where(c: NeoXConfig) -> Iterator[Problem]:
    """A block that says how to offload, and not where to, would do nothing."""
    zero = c.zero.zero_optimization
    for name, given in (("offload_param", zero.offload_param), ("offload_optimizer", zero.offload_optimizer)):
        if given.device == "none" and given.model_fields_set and "device" not in given.model_fields_set:
            yield Problem(
                f"zero_optimization.{name}.device", "is missing", "add device: cpu, nvme or none", value=""
            )


def nvme_has_a_buffer_per_state(c: NeoXConfig) -> Iterator[Problem]:
    """Adam moves a parameter, its gradient and two running means."""
    offload = c.zero.zero_optimization.offload_optimizer
    if offload.device == "nvme" and offload.buffer_count < _ADAM_STATES:
        yield Problem(
            "zero_optimization.offload_optimizer.buffer_count",
            f"is less than the {_ADAM_STATES} tensors that Adam keeps for a parameter",
            f"use at least {_ADAM_STATES}",
        )


def nvme_needs_a_path(c: NeoXConfig) -> Iterator[Problem]:
    """Offloading to NVMe says where."""
    zero = c.zero.zero_optimization
    for name, device, path in (
        ("offload_param", zero.offload_param.device, zero.offload_param.nvme_path),
        ("offload_optimizer", zero.offload_optimizer.device, zero.offload_optimizer.nvme_path),
    ):
        if device == "nvme" and path is None:
            yield Problem(
                f"zero_optimization.{name}.device", "needs a folder", "add nvme_path: /path/to/folder"
            )


def twin_flow_needs_stage_3(c: NeoXConfig) -> Iterator[Problem]:
    """Only stage 3 can leave a part of the states on the device."""
    zero = c.zero.zero_optimization
    if zero.offload_optimizer.ratio < 1 and zero.stage != 3:
        yield Problem(
            "zero_optimization.offload_optimizer.ratio", "below 1 needs stage 3", "set ratio: 1 or stage: 3"
        )


def predivide_or_prescale(c: NeoXConfig) -> Iterator[Problem]:
    """Dividing before the sum happens once."""
    if c.engine.prescale_gradients and c.engine.gradient_predivide_factor != 1.0:
        yield Problem(
            "gradient_predivide_factor",
            "has no effect with prescale_gradients: true",
            "leave one of them out",
        )


def reduced_shares_are_divided_once(c: NeoXConfig) -> Iterator[Problem]:
    """ZeRO that reduces each part to its owner divides once, before the sum."""
    zero = c.zero.zero_optimization
    if zero.stage == 0 or not zero.reduce_scatter:
        return
    remedy = "leave it out, or set zero_optimization.reduce_scatter: false"
    if c.engine.gradient_predivide_factor != 1.0:
        yield Problem("gradient_predivide_factor", "works with ZeRO only without reduce_scatter", remedy)
    if c.engine.prescale_gradients and zero.stage >= 2:
        what = "works with ZeRO stage 2 and above only without reduce_scatter"
        yield Problem("prescale_gradients", what, remedy)


def gathered_buckets_are_even(c: NeoXConfig) -> Iterator[Problem]:
    """DeepSpeed's stages 1 and 2 begin every message at a multiple of four bytes."""
    zero = c.zero.zero_optimization
    if zero.stage in (1, 2) and zero.allgather_bucket_size % 2:
        what = "must be an even number"
        yield Problem(
            "zero_optimization.allgather_bucket_size", what, f"use {zero.allgather_bucket_size + 1}"
        )
