"""Rules between parameters: one small function each, named for what it says; all are run, all findings told.

A rule that reads a value which is itself wrong is skipped: there is nothing to compare yet. Rules about
the number of devices are in `resolve.py`.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from neox_launcher.config.attention_layers import expand_attention
from neox_launcher.config.launch_rules import LAUNCH_RULES
from neox_launcher.config.model_rules import MODEL_RULES
from neox_launcher.config.problems import Place, Problem, did_you_mean, in_words, place_of
from neox_launcher.config.schema import NeoXConfig
from neox_launcher.config.sections.optimizer import KNOWN_OPTIMIZERS, TORCH_OPTIMIZERS
from neox_launcher.config.tree_rules import TREE_RULES

__all__ = ["RULES", "broken_rules"]

Rule = Callable[[NeoXConfig], Iterator[Problem]]
RULES: list[Rule] = []

_ADAM_STATES = 4


def rule(check: Rule) -> Rule:
    """Add a rule to RULES."""
    RULES.append(check)
    return check


def broken_rules(config: NeoXConfig, places: Mapping[str, Place], *, is_partial: bool) -> list[Problem]:
    """What the rules say about a configuration.

    Args:
        config: may lack fields when `is_partial`.
        places: where given values were written.
        is_partial: some values were wrong by themselves and are absent.
    """
    problems: list[Problem] = []
    for check in (*RULES, *LAUNCH_RULES, *MODEL_RULES, *TREE_RULES):
        try:
            found = list(check(config))
        except AttributeError:
            if not is_partial:
                raise
            continue
        for problem in found:
            value = in_words(config.value_of(problem.name))
            problems.append(problem.located(place_of(places, problem.name), value))
    return problems


@rule
def heads_divide_the_width(c: NeoXConfig) -> Iterator[Problem]:
    """Every head has the same whole number of channels."""
    if c.model.hidden_size % c.model.num_attention_heads:
        near = (
            [n for n in range(1, c.model.hidden_size + 1) if c.model.hidden_size % n == 0]
            if (c.model.hidden_size < 100_000)
            else []
        )
        near = sorted(sorted(near, key=lambda n: abs(n - c.model.num_attention_heads))[:4])
        yield Problem(
            "num_attention_heads",
            f"does not divide hidden-size: {c.model.hidden_size}",
            f"use {', '.join(str(n) for n in near)}" if near else "",
        )


@rule
def samples_fit_the_positions(c: NeoXConfig) -> Iterator[Problem]:
    """A sample is no longer than the positions that the model knows."""
    if c.model.seq_length > c.model.max_position_embeddings:
        yield Problem(
            "seq_length",
            f"is more than max-position-embeddings: {c.model.max_position_embeddings}",
            f"set max-position-embeddings: {c.model.seq_length}, or a shorter seq-length",
        )


@rule
def rotary_turns_pairs_of_channels(c: NeoXConfig) -> Iterator[Problem]:
    """Rotary positions turn an even number of each head's channels."""
    if c.attention.pos_emb != "rotary" or c.model.hidden_size % c.model.num_attention_heads:
        return
    width = c.model.hidden_size // c.model.num_attention_heads
    rotated = int(width * c.attention.rotary_pct)
    if rotated % 2 or rotated == 0:
        yield Problem(
            "rotary_pct",
            f"rotates {rotated} of the {width} channels of a head; it must be an even number, at least 2",
            "use 1, 0.5 or 0.25, or another width of the heads"
            if width % 2 == 0
            else "change hidden-size or the heads",
        )


@rule
def attention_config_fits_the_layers(c: NeoXConfig) -> Iterator[Problem]:
    """attention_config gives every layer one known type."""
    try:
        expand_attention(c.attention.attention_config, c.model.num_layers)
    except ValueError as error:
        what, _, remedy = str(error).partition("; ")
        yield Problem("attention_config", what, remedy)


@rule
def stages_have_layers(c: NeoXConfig) -> Iterator[Problem]:
    """A pipeline stage holds at least one layer."""
    stages, layers = c.parallelism.pipe_parallel_size, c.model.num_layers
    if stages > layers:
        yield Problem("pipe_parallel_size", f"is more than num-layers: {layers}", f"use at most {layers}")


@rule
def layers_are_dealt_by_a_pattern(c: NeoXConfig) -> Iterator[Problem]:
    """What stands behind `type:` is a regular expression."""
    kind, _, pattern = c.parallelism.pipe_partition_method.partition(":")
    if kind.lower() == "type":
        try:
            re.compile(pattern)
        except re.error as error:
            yield Problem(
                "pipe_partition_method",
                f"is no regular expression behind type: ({error})",
                "use type:transformer|mlp",
            )


@rule
def shared_layers_come_out_even(c: NeoXConfig) -> Iterator[Problem]:
    """Sets of shared weights divide the layers."""
    unique = c.model.num_unique_layers
    if unique is not None and c.model.num_layers % unique:
        yield Problem(
            "num_unique_layers", f"does not divide num-layers: {c.model.num_layers}", "use a divisor of it"
        )


@rule
def bias_gelu_needs_gelu(c: NeoXConfig) -> Iterator[Problem]:
    """The fused kernel knows gelu only."""
    if c.model.bias_gelu_fusion is True and c.model.activation != "gelu":
        yield Problem(
            "bias_gelu_fusion",
            f"needs activation: gelu, not {c.model.activation}",
            "set bias-gelu-fusion: false, or activation: gelu",
        )


@rule
def rope_fusion_needs_rotary_positions(c: NeoXConfig) -> Iterator[Problem]:
    """Without rotary positions nothing is rotated."""
    if c.attention.rope_fusion is True and c.attention.pos_emb != "rotary":
        yield Problem(
            "rope_fusion",
            f"needs pos-emb: rotary, not {c.attention.pos_emb}",
            "set rope-fusion: false, or pos-emb: rotary",
        )


@rule
def layernorm_fusion_needs_layernorm(c: NeoXConfig) -> Iterator[Problem]:
    """The kernel calculates layer norms, and apexlayernorm names another one for them."""
    if c.model.layernorm_fusion is True and c.model.norm != "layernorm":
        yield Problem(
            "layernorm_fusion",
            f"needs norm: layernorm, not {c.model.norm}",
            "set layernorm-fusion: false, or norm: layernorm",
        )


@rule
def one_softmax_fusion(c: NeoXConfig) -> Iterator[Problem]:
    """The two fused softmax kernels exclude each other."""
    attention = c.attention
    if (
        attention.scaled_upper_triang_masked_softmax_fusion is True
        and attention.scaled_masked_softmax_fusion is True
    ):
        yield Problem(
            "scaled_masked_softmax_fusion",
            "and scaled-upper-triang-masked-softmax-fusion cannot both be true",
            "keep scaled-upper-triang-masked-softmax-fusion: it is the causal one",
        )


@rule
def one_residual_order(c: NeoXConfig) -> Iterator[Problem]:
    """The residual is taken after the norm or shared by both parts, not both."""
    if c.model.gpt_j_residual and c.model.apply_residual_connection_post_layernorm:
        yield Problem(
            "gpt_j_residual",
            "and apply-residual-connection-post-layernorm cannot both be true",
            "set one of them to false",
        )


@rule
def zero_2_and_above_need_the_plain_model(c: NeoXConfig) -> Iterator[Problem]:
    """DeepSpeed cannot split gradients (ZeRO stage >= 2) across pipeline stages."""
    if c.zero.zero_optimization.stage >= 2 and c.parallelism.pipe_parallel_size >= 1:
        yield Problem(
            "zero_optimization.stage",
            "stage 2 and above do not work with pipeline parallelism",
            "set pipe-parallel-size: 0, or stage: 1",
        )


@rule
def offload_param_needs_stage_3(c: NeoXConfig) -> Iterator[Problem]:
    """Only stage 3 shares parameters, so only there can they live elsewhere."""
    zero = c.zero.zero_optimization
    if zero.offload_param.device != "none" and zero.stage != 3:
        yield Problem(
            "zero_optimization.offload_param.device", f"needs stage 3, not {zero.stage}", "set stage: 3"
        )


@rule
def offload_optimizer_needs_zero(c: NeoXConfig) -> Iterator[Problem]:
    """Optimizer states move in stages 1 to 3, to NVMe in stage 3 only."""
    zero = c.zero.zero_optimization
    name = "zero_optimization.offload_optimizer.device"
    if zero.offload_optimizer.device != "none" and zero.stage == 0:
        yield Problem(name, "needs ZeRO", "set stage: 1, 2 or 3")
    elif zero.offload_optimizer.device == "nvme" and zero.stage != 3:
        yield Problem(name, f"needs stage 3, not {zero.stage}", "set stage: 3, or device: cpu")


@rule
def offloading_says_where(c: NeoXConfig) -> Iterator[Problem]:
    """A block that says how to offload, and not where to, would do nothing."""
    zero = c.zero.zero_optimization
    for name, given in (("offload_param", zero.offload_param), ("offload_optimizer", zero.offload_optimizer)):
        if given.device == "none" and given.model_fields_set and "device" not in given.model_fields_set:
            yield Problem(
                f"zero_optimization.{name}.device", "is missing", "add device: cpu, nvme or none", value=""
            )


@rule
def nvme_has_a_buffer_per_state(c: NeoXConfig) -> Iterator[Problem]:
    """Adam moves a parameter, its gradient and two running means."""
    offload = c.zero.zero_optimization.offload_optimizer
    if offload.device == "nvme" and offload.buffer_count < _ADAM_STATES:
        yield Problem(
            "zero_optimization.offload_optimizer.buffer_count",
            f"is less than the {_ADAM_STATES} tensors that Adam keeps for a parameter",
            f"use at least {_ADAM_STATES}",
        )


@rule
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


@rule
def one_precision(c: NeoXConfig) -> Iterator[Problem]:
    """fp16, bf16 and amp exclude each other."""
    enabled = [name for name in ("fp16", "bf16", "amp") if getattr(c.precision, name).enabled]
    if len(enabled) > 1:
        yield Problem(f"{enabled[1]}.enabled", f"excludes {enabled[0]}.enabled: true", "keep one of the two")


@rule
def precision_agrees_with_the_blocks(c: NeoXConfig) -> Iterator[Problem]:
    """`precision` says what the fp16 and bf16 blocks say."""
    named = c.precision.precision
    by_block = {"fp16": c.precision.fp16.enabled, "bfloat16": c.precision.bf16.enabled}
    enabled = [name for name, on in by_block.items() if on]
    if named is not None and enabled and named not in enabled:
        block = "bf16" if enabled[0] == "bfloat16" else enabled[0]
        yield Problem("precision", f"contradicts {block}.enabled: true", "keep one of the two")
    given_off = (
        named in by_block
        and "enabled" in getattr(c.precision, "bf16" if named == "bfloat16" else "fp16").model_fields_set
    )
    if given_off and not by_block[str(named)]:
        yield Problem("precision", "contradicts the block that says enabled: false", "keep one of the two")


@rule
def amp_excludes_zero(c: NeoXConfig) -> Iterator[Problem]:
    """Apex's mixed precision keeps weights that ZeRO does not know."""
    if c.precision.amp.enabled and c.zero.zero_optimization.stage > 0:
        yield Problem("amp.enabled", "does not work with ZeRO", "use bf16 or fp16, or stage: 0")


@rule
def fp16_cross_entropy_needs_fp16(c: NeoXConfig) -> Iterator[Problem]:
    """The loss can be float16 only where the logits are."""
    is_fp16 = c.precision.fp16.enabled or c.precision.precision == "fp16"
    if c.precision.fp16_lm_cross_entropy and not is_fp16:
        yield Problem("fp16_lm_cross_entropy", "needs fp16", "enable fp16, or leave it out")


@rule
def floor_is_below_the_peak(c: NeoXConfig) -> Iterator[Problem]:
    """The learning rate's floor is not above its peak."""
    lr = c.optimizer.optimizer.params.lr
    if c.lr_schedule.min_lr > lr:
        yield Problem("min_lr", f"is more than optimizer.params.lr: {lr}", "set a smaller min-lr")


@rule
def one_schedule_after_loading(c: NeoXConfig) -> Iterator[Problem]:
    """Either the checkpoint's schedule or the configuration's wins."""
    if c.lr_schedule.override_lr_scheduler and c.lr_schedule.use_checkpoint_lr_scheduler:
        yield Problem(
            "override_lr_scheduler", "excludes use-checkpoint-lr-scheduler: true", "set one of them to false"
        )


@rule
def betas_are_decays(c: NeoXConfig) -> Iterator[Problem]:
    """Adam's running means forget."""
    betas = c.optimizer.optimizer.params.betas
    if not all(0 <= beta < 1 for beta in betas):
        yield Problem(
            "optimizer.params.betas",
            "must be two numbers, each at least 0 and less than 1",
            "use [0.9, 0.95]",
        )


@rule
def the_optimizer_is_known(c: NeoXConfig) -> Iterator[Problem]:
    """One of ours, of DeepSpeed's or of torch's."""
    optimizer = c.optimizer.optimizer
    names = (*KNOWN_OPTIMIZERS, *TORCH_OPTIMIZERS)
    if optimizer.kind not in [name.lower() for name in names]:
        near = did_you_mean(optimizer.type, names)
        yield Problem("optimizer.type", "is no optimizer here", near or f"use {', '.join(names)}")


@rule
def known_optimizers_know_their_arguments(c: NeoXConfig) -> Iterator[Problem]:
    """A misspelt argument of an optimizer that we know is found here and not by its constructor."""
    optimizer = c.optimizer.optimizer
    if optimizer.kind not in [name.lower() for name in KNOWN_OPTIMIZERS]:
        return
    extra_names = {"sm3": ("momentum", "beta"), "madgrad_wd": ("momentum",)}.get(optimizer.kind, ())
    for name in optimizer.params.model_extra or {}:
        if name not in extra_names:
            remedy = (
                did_you_mean(name, type(optimizer.params).model_fields, cutoff=0.6) or "check its spelling"
            )
            yield Problem(f"optimizer.params.{name}", f"is no argument of {optimizer.type}", remedy)


@rule
def one_bit_adam_is_told_how_to_communicate(c: NeoXConfig) -> Iterator[Problem]:
    """Its three keys have no value that is right everywhere."""
    optimizer = c.optimizer.optimizer
    needed = {"freeze_step": "100000", "cuda_aware": "false", "comm_backend_name": "nccl"}
    for name, example in needed.items():
        if optimizer.kind == "onebitadam" and name not in optimizer.params.model_fields_set:
            yield Problem(
                f"optimizer.params.{name}",
                f"is missing, and {optimizer.type} needs it",
                f"add {name}: {example} to optimizer.params",
                value="",
            )


@rule
def zero_with_other_optimizers_is_allowed_first(c: NeoXConfig) -> Iterator[Problem]:
    """DeepSpeed has tried ZeRO with Adam and LAMB."""
    optimizer = c.optimizer
    tested = [name.lower() for name in KNOWN_OPTIMIZERS if name not in ("SM3", "madgrad_wd")]
    is_tested = optimizer.optimizer.kind in tested
    if c.zero.zero_optimization.stage > 0 and not is_tested and not optimizer.zero_allow_untested_optimizer:
        yield Problem(
            "optimizer.type",
            "has not been tried with ZeRO by DeepSpeed",
            "add zero_allow_untested_optimizer: true (outside zero_optimization), or use Adam, or stage: 0",
        )


@rule
def micro_batch_or_batch_is_given(c: NeoXConfig) -> Iterator[Problem]:
    """One of the two sizes is the least that a run needs."""
    training = c.training
    sizes = (training.train_batch_size, training.train_micro_batch_size_per_gpu)
    if sizes == (None, None) and not c.elasticity.elasticity.enabled:
        yield Problem(
            "train_micro_batch_size_per_gpu",
            "is missing, and so is train-batch-size",
            "add train-micro-batch-size-per-gpu: 4 (samples that a device handles at once)",
            value="",
        )


@rule
def data_comes_one_way(c: NeoXConfig) -> Iterator[Problem]:
    """Either one dataset that is split, or three lists."""
    data = c.data
    lists = {
        name: getattr(data, name) for name in ("train_data_paths", "valid_data_paths", "test_data_paths")
    }
    given = [name for name, paths in lists.items() if paths is not None]
    if given and data.data_path is not None:
        yield Problem(given[0], "excludes data-path", "leave one of them out")
    if given and len(given) < len(lists):
        missing = ", ".join(name.replace("_", "-") for name in lists if name not in given)
        yield Problem(given[0], f"is given without {missing}", "give all three lists")
    for name, paths in lists.items():
        if paths is not None and not paths:
            yield Problem(name, "is empty", "name at least one dataset")


@rule
def weights_match_the_paths(c: NeoXConfig) -> Iterator[Problem]:
    """One weight per dataset, none negative, not all zero."""
    for part in ("train", "valid", "test"):
        weights = getattr(c.data, f"{part}_data_weights")
        paths = getattr(c.data, f"{part}_data_paths")
        name = f"{part}_data_weights"
        if weights is None:
            continue
        if paths is None:
            yield Problem(
                name, f"has no {part}-data-paths to weigh", f"add {part}-data-paths, or leave it out"
            )
        elif len(weights) != len(paths):
            yield Problem(
                name,
                f"has {_count(len(weights), 'number')} for {_count(len(paths), 'dataset')}",
                "give one number per dataset",
            )
        if any(weight < 0 for weight in weights) or not any(weights):
            yield Problem(name, "must be numbers of which none is negative and one is positive", "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


@rule
def split_keeps_something(c: NeoXConfig) -> Iterator[Problem]:
    """The shares of the three parts are not all zero."""
    shares = [float(part) for part in c.data.split.replace("/", ",").split(",") if part.strip()]
    if not any(shares):
        yield Problem("split", "gives nothing to any part", "use 969,30,1")


@rule
def saving_needs_an_interval(c: NeoXConfig) -> Iterator[Problem]:
    """A folder for checkpoints comes with how often to write them."""
    if c.checkpoint.save is not None and c.checkpoint.save_interval is None:
        yield Problem(
            "save", "needs save-interval", "add save-interval: 1000 (iterations between checkpoints)"
        )


@rule
def contiguous_checkpointing_partitions(c: NeoXConfig) -> Iterator[Problem]:
    """DeepSpeed's one buffer holds partitioned activations only."""
    activation = c.activation_checkpointing
    if activation.contiguous_checkpointing and not activation.partition_activations:
        yield Problem(
            "contiguous_checkpointing", "needs partition-activations", "set partition-activations: true"
        )


@rule
def gradient_norms_need_the_plain_model(c: NeoXConfig) -> Iterator[Problem]:
    """The pipeline engine does not keep each gradient."""
    if c.logging.log_grad_norm and c.parallelism.pipe_parallel_size >= 1:
        yield Problem(
            "log_grad_norm", "works only without pipeline stages", "set pipe-parallel-size: 0, or false"
        )


@rule
def deepspeed_is_the_engine(c: NeoXConfig) -> Iterator[Problem]:
    """There is no other engine."""
    if not c.engine.deepspeed:
        yield Problem("deepspeed", "cannot be false: there is no other engine", "leave it out")


@rule
def predivide_or_prescale(c: NeoXConfig) -> Iterator[Problem]:
    """Dividing before the sum happens once."""
    if c.engine.prescale_gradients and c.engine.gradient_predivide_factor != 1.0:
        yield Problem(
            "gradient_predivide_factor",
            "has no effect with prescale_gradients: true",
            "leave one of them out",
        )


@rule
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


@rule
def gathered_buckets_are_even(c: NeoXConfig) -> Iterator[Problem]:
    """DeepSpeed's stages 1 and 2 begin every message at a multiple of four bytes."""
    zero = c.zero.zero_optimization
    if zero.stage in (1, 2) and zero.allgather_bucket_size % 2:
        what = "must be an even number"
        yield Problem(
            "zero_optimization.allgather_bucket_size", what, f"use {zero.allgather_bucket_size + 1}"
        )


@rule
def twin_flow_needs_stage_3(c: NeoXConfig) -> Iterator[Problem]:
    """Only stage 3 can leave a part of the states on the device."""
    zero = c.zero.zero_optimization
    if zero.offload_optimizer.ratio < 1 and zero.stage != 3:
        yield Problem(
            "zero_optimization.offload_optimizer.ratio", "below 1 needs stage 3", "set ratio: 1 or stage: 3"
        )
