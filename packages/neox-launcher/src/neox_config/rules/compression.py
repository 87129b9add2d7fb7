"""Rules about compression_training."""

from collections.abc import Iterator

from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig

_COMPRESSIONS = (
    "weight_quantization",
    "activation_quantization",
    "sparse_pruning",
    "row_pruning",
    "head_pruning",
    "channel_pruning",
)


def compression_says_what_it_compresses(c: NeoXConfig) -> Iterator[Problem]:
    """Require at least one group in every enabled part, unless its method selects the weights itself."""
    for part in _COMPRESSIONS:
        block = getattr(c.compression.compression_training, part)
        finds_them = getattr(block.shared_parameters, "method", "") == "snip_momentum"
        if block.shared_parameters.enabled and not block.different_groups and not finds_them:
            yield Problem(
                f"compression_training.{part}.different_groups",
                f"is empty, but {part} is enabled",
                "add a group: {my_group: {params: {...}, modules: [...]}}",
                value="",
            )


def bits_do_not_grow(c: NeoXConfig) -> Iterator[Problem]:
    """Require target_bits to be at most start_bits."""
    groups = c.compression.compression_training.weight_quantization.different_groups
    for key, group in groups.items():
        if group.params.target_bits > group.params.start_bits:
            yield Problem(
                f"compression_training.weight_quantization.different_groups.{key}.params.target_bits",
                f"is more than start_bits: {group.params.start_bits}",
                f"use at most {group.params.start_bits}",
            )


def fp32_weights_are_quantized_forward(c: NeoXConfig) -> Iterator[Problem]:
    """Require fp16 for quantization in the optimizer step and in the kernel."""
    shared = c.compression.compression_training.weight_quantization.shared_parameters
    name = "compression_training.weight_quantization.shared_parameters"
    if shared.enabled and not c.precision.is_fp16 and not shared.quantize_weight_in_forward:
        yield Problem(
            f"{name}.quantize_weight_in_forward",
            "must be true without fp16",
            "set it to true, or enable fp16",
        )
    if shared.enabled and not c.precision.is_fp16 and shared.quantizer_kernel:
        yield Problem(f"{name}.quantizer_kernel", "requires fp16", "enable fp16, or set it to false")


def pruning_ends_after_it_starts(c: NeoXConfig) -> Iterator[Problem]:
    """Require pruning to end after it starts."""
    shared = c.compression.compression_training.sparse_pruning.shared_parameters
    end = shared.schedule_offset_end
    if end is not None and end < shared.schedule_offset:
        yield Problem(
            "compression_training.sparse_pruning.shared_parameters.schedule_offset_end",
            f"is before schedule_offset: {shared.schedule_offset}",
            f"use at least {shared.schedule_offset}",
        )


def students_copy_named_layers(c: NeoXConfig) -> Iterator[Problem]:
    """Require one teacher layer per layer of the student, and the names of the modules to copy."""
    name = "compression_training.layer_reduction"
    reduction = c.compression.compression_training.layer_reduction
    kept, listed = reduction.keep_number_layer, reduction.teacher_layer
    if kept is not None and listed is not None and len(listed) != kept:
        what = f"lists {len(listed)} layers, but keep_number_layer is {kept}"
        yield Problem(f"{name}.teacher_layer", what, f"list {kept} layers")
    if reduction.enabled and not reduction.module_name_prefix and not reduction.other_module_name:
        yield Problem(
            f"{name}.module_name_prefix",
            "is missing, and so is other_module_name",
            "add one of them to name the modules to copy",
            value="",
        )
