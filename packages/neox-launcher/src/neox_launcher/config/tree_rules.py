"""Rules inside DeepSpeed's own blocks of parameters; `rules.py` runs them with its own."""

from collections.abc import Iterator, Mapping
from itertools import pairwise

from neox_launcher.config.attention_layers import expand_attention
from neox_launcher.config.curriculum_rules import (
    curricula_choose_samples_or_cut_them,
    curricula_cut_to_lengths_that_there_are,
)
from neox_launcher.config.not_yet import REFUSED
from neox_launcher.config.parameter import Section, is_needed
from neox_launcher.config.problems import Problem
from neox_launcher.config.schema import NeoXConfig, sections
from neox_launcher.config.sections.data_efficiency import Pace

__all__ = ["TREE_RULES"]


def enabled_blocks_have_what_they_need(c: NeoXConfig) -> Iterator[Problem]:
    """What is marked as needed is given where `enabled` of its block is true."""
    for section in sections():
        yield from _missing(getattr(c, section), "", is_enabled=False)


def _missing(section: Section, prefix: str, *, is_enabled: bool) -> Iterator[Problem]:
    if not section.model_fields_set:
        return
    is_enabled = getattr(section, "enabled", is_enabled)
    for name, declared in type(section).model_fields.items():
        value = getattr(section, name)
        if is_enabled and is_needed(declared) and (value is None or value == {}):
            what = f"is missing, and its block is enabled: {declared.description}"
            yield Problem(f"{prefix}{name}", what, f"add {name}: ...", value="")
        if isinstance(value, Section):
            yield from _missing(value, f"{prefix}{name}.", is_enabled=is_enabled)


def what_nothing_carries_out_is_refused(c: NeoXConfig) -> Iterator[Problem]:
    """What is documented and will not be done is not silently left out."""
    for name, why in REFUSED.items():
        if c.value_of(name):
            yield Problem(name, why, "leave it out")


def autotuning_times_at_least_one_iteration(c: NeoXConfig) -> Iterator[Problem]:
    """A trial is timed from its start to its end."""
    tuning = c.autotuning.autotuning
    if tuning.end_profile_step < tuning.start_profile_step:
        yield Problem(
            "autotuning.end_profile_step",
            f"is before start_profile_step: {tuning.start_profile_step}",
            f"use at least {tuning.start_profile_step}",
        )


def elastic_sizes_are_in_order(c: NeoXConfig) -> Iterator[Problem]:
    """The most is not less than the fewest, and a micro-batch is no larger than the batch."""
    elastic = c.elasticity.elasticity
    if elastic.max_gpus < elastic.min_gpus:
        what = f"is less than min_gpus: {elastic.min_gpus}"
        yield Problem("elasticity.max_gpus", what, f"use at least {elastic.min_gpus}")
    largest = max(elastic.micro_batch_sizes)
    if largest > elastic.max_train_batch_size:
        yield Problem(
            "elasticity.micro_batch_sizes",
            f"holds {largest:,}, more than max_train_batch_size: {elastic.max_train_batch_size:,}",
            "leave it out, or raise max_train_batch_size",
        )


def elastic_jobs_leave_batch_sizes_to_the_block(c: NeoXConfig) -> Iterator[Problem]:
    """The elastic block chooses the batch sizes, so nothing else says them."""
    elastic = c.elasticity.elasticity
    if not elastic.enabled or elastic.ignore_non_elastic_batch_info:
        return
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if getattr(c.training, name) is not None:
            yield Problem(
                name,
                "contradicts elasticity.enabled: true, which chooses the batch sizes",
                "leave it out, or set elasticity.ignore_non_elastic_batch_info: true",
            )


def elastic_jobs_have_one_copy_per_stage(c: NeoXConfig) -> Iterator[Problem]:
    """The block knows devices that share layers, as many as the model has, and no stages."""
    elastic, parallel = c.elasticity.elasticity, c.parallelism
    if elastic.enabled and parallel.pipe_parallel_size > 1:
        yield Problem("elasticity.enabled", "works only without pipeline stages", "set pipe-parallel-size: 0")
    given = "model_parallel_size" in elastic.model_fields_set
    if elastic.enabled and given and elastic.model_parallel_size != max(1, parallel.model_parallel_size):
        yield Problem(
            "elasticity.model_parallel_size",
            f"is not model-parallel-size: {parallel.model_parallel_size}",
            "leave it out: it follows",
        )


def one_run_of_wandb(c: NeoXConfig) -> Iterator[Problem]:
    """A process reports to one run."""
    if c.monitors.wandb.enabled and c.logging.use_wandb:
        yield Problem("wandb.enabled", "excludes use-wandb: true", "keep one of the two")


def profiling_needs_the_plain_model(c: NeoXConfig) -> Iterator[Problem]:
    """DeepSpeed's pipeline engine starts the profile and never ends it."""
    if c.engine.flops_profiler.enabled and c.parallelism.pipe_parallel_size >= 1:
        yield Problem(
            "flops_profiler.enabled", "works only without pipeline stages", "set pipe-parallel-size: 0"
        )


def token_dropping_names_its_layers(c: NeoXConfig) -> Iterator[Problem]:
    """As many layers are listed as are counted, and no more than there are."""
    name = "data_efficiency.data_routing.random_ltd"
    ltd = c.data_efficiency.data_efficiency.data_routing.random_ltd
    count, listed, total = ltd.random_ltd_layer_num, ltd.random_ltd_layer_id, ltd.total_layer_num
    if count is not None and listed is not None and len(listed) != count:
        what = f"lists {len(listed)} layers, but random_ltd_layer_num is {count}"
        yield Problem(f"{name}.random_ltd_layer_id", what, "list each layer once")
    if count is not None and total is not None and count > total:
        what = f"is more than total_layer_num: {total}"
        yield Problem(f"{name}.random_ltd_layer_num", what, f"use at most {total}")
    schedule = ltd.random_ltd_schedule
    yield from _in_order(f"{name}.random_ltd_schedule", "value", schedule.min_value, schedule.max_value)


def token_dropping_fits_the_model(c: NeoXConfig) -> Iterator[Problem]:
    """Layers that see a part of the tokens exist, attend to any token, and hold whole sequences."""
    efficiency = c.data_efficiency.data_efficiency
    routing = efficiency.data_routing
    if not (efficiency.enabled and routing.enabled and routing.random_ltd.enabled):
        return
    name = "data_efficiency.data_routing.random_ltd"
    listed, layers = routing.random_ltd.random_ltd_layer_id or (), c.model.num_layers
    if routing.random_ltd.total_layer_num not in (None, layers):
        yield Problem(f"{name}.total_layer_num", f"is not num-layers: {layers}", f"use {layers}")
    if len(set(listed)) < len(listed) or not all(0 <= index < layers for index in listed):
        what = f"must name different layers, from 0 to {layers - 1}"
        yield Problem(f"{name}.random_ltd_layer_id", what, "list each layer once")
    hindrances = {
        f"pos-emb: {c.attention.pos_emb}": c.attention.pos_emb in ("rpe", "alibi"),
        "attention-config with other layers than global": _has_other_attention(c),
        "sequence-parallel": c.parallelism.sequence_parallel,
        "rope-fusion: true": c.attention.rope_fusion is True,
        "num-unique-layers": c.model.num_unique_layers is not None,
    }
    for hindrance, is_there in hindrances.items():
        if is_there:
            yield Problem(f"{name}.enabled", f"does not work with {hindrance}", "leave one of them out")


def _has_other_attention(c: NeoXConfig) -> bool:
    try:
        kinds = expand_attention(c.attention.attention_config, c.model.num_layers)
    except ValueError:
        return False
    return any(kind != "global" for kind in kinds)


def curricula_grow_as_their_schedule_says(c: NeoXConfig) -> Iterator[Problem]:
    """Each schedule has the numbers that it needs, and the difficulty does not fall."""
    legacy = c.data_efficiency.curriculum_learning
    name = "curriculum_learning"
    yield from _in_order(name, "difficulty", legacy.min_difficulty, legacy.max_difficulty)
    if legacy.enabled:
        yield from _pace(name, legacy.schedule_type, legacy.schedule_config)
    name = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"
    metrics = c.data_efficiency.data_efficiency.data_sampling.curriculum_learning.curriculum_metrics
    for key, metric in metrics.items():
        yield from _in_order(f"{name}.{key}", "difficulty", metric.min_difficulty, metric.max_difficulty)
        yield from _pace(f"{name}.{key}", metric.schedule_type, metric.schedule_config)


_PACES: Mapping[str, tuple[str, ...]] = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


def _pace(name: str, schedule: str | None, pace: Pace) -> Iterator[Problem]:
    for needed in _PACES[schedule or "custom"]:
        if getattr(pace, needed) is None:
            what = f"is missing, and schedule_type is {schedule}"
            yield Problem(f"{name}.schedule_config.{needed}", what, f"add {needed}: ...", value="")
    for rising in ("difficulty", "max_step"):
        values = getattr(pace, rising) or ()
        if any(later <= earlier for earlier, later in pairwise(values)):
            yield Problem(f"{name}.schedule_config.{rising}", "does not rise", "give rising numbers")
    if pace.difficulty is not None and pace.max_step is not None:
        if len(pace.max_step) != len(pace.difficulty) - 1:
            what = f"holds {len(pace.max_step)} numbers for {len(pace.difficulty)} difficulties"
            remedy = "give one number fewer than difficulties: the last one has no end"
            yield Problem(f"{name}.schedule_config.max_step", what, remedy)


def _in_order(name: str, what: str, smallest: int | None, largest: int | None) -> Iterator[Problem]:
    if smallest is not None and largest is not None and largest < smallest:
        yield Problem(
            f"{name}.max_{what}", f"is less than min_{what}: {smallest}", f"use at least {smallest}"
        )


_COMPRESSIONS = (
    "weight_quantization",
    "activation_quantization",
    "sparse_pruning",
    "row_pruning",
    "head_pruning",
    "channel_pruning",
)


def compression_says_what_it_compresses(c: NeoXConfig) -> Iterator[Problem]:
    """An enabled part names at least one group, unless its method finds the weights by itself."""
    for part in _COMPRESSIONS:
        block = getattr(c.compression.compression_training, part)
        finds_them = getattr(block.shared_parameters, "method", "") == "snip_momentum"
        if block.shared_parameters.enabled and not block.different_groups and not finds_them:
            yield Problem(
                f"compression_training.{part}.different_groups",
                "is empty, and the part is enabled",
                "add a group: {my_group: {params: {...}, modules: [...]}}",
                value="",
            )


def bits_do_not_grow(c: NeoXConfig) -> Iterator[Problem]:
    """Quantization goes from more bits to fewer."""
    groups = c.compression.compression_training.weight_quantization.different_groups
    for key, group in groups.items():
        if group.params.target_bits > group.params.start_bits:
            yield Problem(
                f"compression_training.weight_quantization.different_groups.{key}.params.target_bits",
                f"is more than start_bits: {group.params.start_bits}",
                f"use at most {group.params.start_bits}",
            )


def fp32_weights_are_quantized_forward(c: NeoXConfig) -> Iterator[Problem]:
    """Only 16-bit training has an update that can quantize."""
    shared = c.compression.compression_training.weight_quantization.shared_parameters
    is_fp16 = c.precision.fp16.enabled or c.precision.precision == "fp16"
    name = "compression_training.weight_quantization.shared_parameters"
    if shared.enabled and not is_fp16 and not shared.quantize_weight_in_forward:
        yield Problem(f"{name}.quantize_weight_in_forward", "must be true without fp16", "set it to true")
    if shared.enabled and not is_fp16 and shared.quantizer_kernel:
        yield Problem(f"{name}.quantizer_kernel", "needs fp16", "enable fp16, or set it to false")


def pruning_ends_after_it_starts(c: NeoXConfig) -> Iterator[Problem]:
    """The pattern is still after it began to change."""
    shared = c.compression.compression_training.sparse_pruning.shared_parameters
    end = shared.schedule_offset_end
    if end is not None and end < shared.schedule_offset:
        yield Problem(
            "compression_training.sparse_pruning.shared_parameters.schedule_offset_end",
            f"is before schedule_offset: {shared.schedule_offset}",
            f"use at least {shared.schedule_offset}",
        )


def students_copy_named_layers(c: NeoXConfig) -> Iterator[Problem]:
    """As many teacher layers are listed as are kept, and it is said where they are."""
    name = "compression_training.layer_reduction"
    reduction = c.compression.compression_training.layer_reduction
    kept, listed = reduction.keep_number_layer, reduction.teacher_layer
    if kept is not None and listed is not None and len(listed) != kept:
        what = f"lists {len(listed)} layers, but keep_number_layer is {kept}"
        yield Problem(f"{name}.teacher_layer", what, "list one teacher layer for each that is kept")
    if reduction.enabled and not reduction.module_name_prefix and not reduction.other_module_name:
        yield Problem(
            f"{name}.module_name_prefix",
            "is missing, and so is other_module_name",
            "add one of them, to say which modules are copied",
            value="",
        )


TREE_RULES = (
    enabled_blocks_have_what_they_need,
    what_nothing_carries_out_is_refused,
    autotuning_times_at_least_one_iteration,
    elastic_sizes_are_in_order,
    elastic_jobs_leave_batch_sizes_to_the_block,
    elastic_jobs_have_one_copy_per_stage,
    one_run_of_wandb,
    profiling_needs_the_plain_model,
    token_dropping_names_its_layers,
    token_dropping_fits_the_model,
    curricula_grow_as_their_schedule_says,
    curricula_choose_samples_or_cut_them,
    curricula_cut_to_lengths_that_there_are,
    compression_says_what_it_compresses,
    bits_do_not_grow,
    fp32_weights_are_quantized_forward,
    pruning_ends_after_it_starts,
    students_copy_named_layers,
)
