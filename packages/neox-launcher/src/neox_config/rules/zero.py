"""Rules about ZeRO: offloading and gradient reduction."""

from collections.abc import Iterator

from neox_config.problems import Problem, refusals
from neox_config.schema.config import NeoXConfig

_ADAM_STATES = 4


def offloading_has_its_stage(c: NeoXConfig) -> Iterator[Problem]:
    """Require ZeRO for offloading states, and stage 3 for offloading them to NVMe, or parameters."""
    zero = c.zero.zero_optimization
    parameters, states = zero.offload_param.device, zero.offload_optimizer.device
    if parameters != "none" and zero.stage != 3:
        what = f"requires stage 3, not {zero.stage}"
        yield Problem("zero_optimization.offload_param.device", what, "set stage: 3")
    name = "zero_optimization.offload_optimizer.device"
    if states != "none" and zero.stage == 0:
        yield Problem(name, "requires ZeRO", "set stage: 1, 2 or 3")
    elif states == "nvme" and zero.stage != 3:
        yield Problem(name, f"requires stage 3, not {zero.stage}", "set stage: 3, or device: cpu")


def offloading_says_where(c: NeoXConfig) -> Iterator[Problem]:
    """Require `device` in every offload block, which has no effect without it, and the folder on NVMe."""
    for block in ("offload_param", "offload_optimizer"):
        given = getattr(c.zero.zero_optimization, block)
        name = f"zero_optimization.{block}.device"
        if given.device == "none" and given.model_fields_set and "device" not in given.model_fields_set:
            yield Problem(name, "is missing", "add device: cpu, nvme or none", value="")
        if given.device == "nvme" and given.nvme_path is None:
            yield Problem(name, "requires nvme_path", "add nvme_path: /path/to/directory")


def nvme_has_a_buffer_per_state(c: NeoXConfig) -> Iterator[Problem]:
    """Require a buffer for each tensor that Adam keeps: parameter, gradient and two running averages."""
    offload = c.zero.zero_optimization.offload_optimizer
    if offload.device == "nvme" and offload.buffer_count < _ADAM_STATES:
        yield Problem(
            "zero_optimization.offload_optimizer.buffer_count",
            f"is less than the {_ADAM_STATES} tensors that Adam keeps per parameter",
            f"use at least {_ADAM_STATES}",
        )


def all_states_are_offloaded(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse to offload a fraction of the optimizer states (DeepSpeed's Twin-Flow).

    DeepSpeed updates the rest with a second AdamW, whose learning rate does not follow the schedule, and
    accepts only its compiled CPU Adam for those that are offloaded.
    """
    offload = c.zero.zero_optimization.offload_optimizer
    if offload.device != "none" and offload.ratio < 1:
        yield Problem(
            "zero_optimization.offload_optimizer.ratio",
            "below 1 makes DeepSpeed update the other states with an AdamW that ignores the schedule",
            "set ratio: 1, or remove offload_optimizer",
        )


def quantized_weights_need_stage_3(c: NeoXConfig) -> Iterator[Problem]:
    """Require stage 3 for quantized weights; DeepSpeed ignores the setting at other stages."""
    zero = c.zero.zero_optimization
    if zero.zero_quantized_weights and zero.stage != 3:
        yield Problem(
            "zero_optimization.zero_quantized_weights",
            f"requires stage 3, not {zero.stage}",
            "set stage: 3, or remove it",
        )


def ranks_are_compared_below_stage_3(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse to compare ranks under stage 3, which partitions the weights: each layer waits for all ranks."""
    is_partitioned = c.zero.zero_optimization.stage == 3
    remedy = "remove it, or set zero_optimization.stage: 2"
    return refusals(
        (
            is_partitioned and c.training.sdc_check_interval is not None,
            "sdc_check_interval",
            "compares copies of weights, but with zero_optimization.stage 3 no rank holds a copy",
            remedy,
        ),
        (
            is_partitioned and c.logging.straggler_threshold is not None,
            "straggler_threshold",
            "compares the times of forward passes, which wait for all ranks under zero_optimization.stage 3",
            remedy,
        ),
    )


def predivide_or_prescale(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse gradient_predivide_factor with prescale_gradients, which overrides it."""
    if c.engine.prescale_gradients and c.engine.gradient_predivide_factor != 1.0:
        yield Problem(
            "gradient_predivide_factor",
            "has no effect with prescale_gradients: true",
            "remove one of them",
        )


def reduced_shares_are_divided_once(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse pre-division settings that ZeRO's reduce-scatter does not support."""
    zero = c.zero.zero_optimization
    if zero.stage == 3 and c.engine.gradient_predivide_factor != 1.0:
        # DeepSpeed divides by the number of ranks as well, and does not multiply if the two are equal.
        what = "does not work with ZeRO stage 3, which computes another mean with it"
        yield Problem("gradient_predivide_factor", what, "remove it, or use stage 2")
        return
    if zero.stage == 0 or not zero.reduce_scatter:
        return
    remedy = "remove it, or set zero_optimization.reduce_scatter: false"
    if c.engine.gradient_predivide_factor != 1.0:
        yield Problem("gradient_predivide_factor", "does not work with ZeRO and reduce_scatter", remedy)
    if c.engine.prescale_gradients and zero.stage >= 2:
        what = "does not work with ZeRO stage 2 and above and reduce_scatter"
        yield Problem("prescale_gradients", what, remedy)


def gathered_buckets_are_even(c: NeoXConfig) -> Iterator[Problem]:
    """Require an even bucket size, because stages 1 and 2 align messages to four bytes."""
    zero = c.zero.zero_optimization
    if zero.stage in (1, 2) and zero.allgather_bucket_size % 2:
        remedy = f"use {zero.allgather_bucket_size + 1}"
        yield Problem("zero_optimization.allgather_bucket_size", "must be an even number", remedy)
