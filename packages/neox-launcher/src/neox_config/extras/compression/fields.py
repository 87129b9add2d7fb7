"""Model compression: quantization, pruning and layer reduction, configured per group of modules."""

from typing import Literal

from neox_config.schema.parameter import Section, block, named_blocks, param
from neox_config.schema.paths import PathText

__all__ = [
    "ActivationQuantization",
    "ChannelPruning",
    "CompressionSection",
    "CompressionTraining",
    "Distillation",
    "HeadPruning",
    "LayerReduction",
    "RowPruning",
    "SparsePruning",
    "WeightQuantization",
]

_SHARED = "Settings shared by all groups."
_GROUPS = "Groups of modules with individual settings; choose any name for a group."
_OFFSET = "Iteration at which it starts."
_ALL_MODULES = ("*",)
_MODULES = (
    "Regular expressions that are found in the logical names of matrices, such as layers.0.mlp.up; "
    '"*" matches all matrices of the transformer layers.'
)
_SNIP = "method is snip_momentum"


class Distillation(Section):
    """Training of a student with the results of its teacher.

    The loss is (1 - logits_share) cross entropy + logits_share temperature^2 divergence of the logits +
    hidden_states_weight mean squared difference of the hidden states (see compression.md).
    """

    enabled: bool = param(
        False, origin="ours", resume="training", doc="Train with the logits and hidden states of the teacher."
    )
    logits_share: float = param(
        0.5,
        origin="ours",
        ge=0,
        le=1,
        resume="training",
        doc="Share of the divergence of the student's logits from the teacher's in the loss.",
    )
    temperature: float = param(
        1.0, origin="ours", gt=0, resume="training", doc="Divisor of the logits of both in the divergence."
    )
    hidden_states_weight: float = param(
        0.0,
        origin="ours",
        ge=0,
        resume="training",
        doc="Weight of the mean squared difference of the outputs of the layers that were copied.",
    )


class LayerReduction(Section):
    """Layer reduction: initialize a smaller student model from layers of a teacher model."""

    enabled: bool = param(
        False, origin="DSC", resume="training", doc="Initialize the model from layers of a larger model."
    )
    teacher: PathText | None = param(
        None,
        origin="ours",
        none_means="no teacher; enabled requires one",
        min_length=1,
        resume="training",
        doc="Folder of the teacher's checkpoints; the latest is read.",
    )
    distill: Distillation = block(
        Distillation, origin="ours", doc="Training with the results of the teacher."
    )
    keep_number_layer: int | None = param(
        None,
        origin="DSC",
        none_means="num-layers",
        gt=0,
        resume="training",
        doc="Number of layers of the student; must be num-layers.",
    )
    module_name_prefix: str | None = param(
        None,
        origin="DSC",
        none_means="no layers are copied",
        min_length=1,
        resume="training",
        doc="Prefix of the names of the layers to copy; must be layers.",
    )
    teacher_layer: tuple[int, ...] | None = param(
        None,
        origin="DSC",
        none_means="no layers; module_name_prefix requires them",
        used_when="module_name_prefix is set",
        min_length=1,
        resume="training",
        doc="Indices of the teacher's layers to copy, in order.",
    )
    other_module_name: tuple[str, ...] | None = param(
        None,
        origin="DSC",
        none_means="no other modules are copied",
        resume="training",
        doc="Full names of other modules to copy, such as embedding, final_norm and lm_head.",
    )


class Fp16MixedQuantize(Section):
    """Gradual transition from 16-bit to quantized weights."""

    enabled: bool = param(False, origin="DSC", doc="Mix 16-bit and quantized weights at first.")
    quantize_change_ratio: float = param(
        0.001,
        origin="DSC",
        gt=0,
        le=1,
        doc="Initial fraction of the quantized weights in the mix; it grows to 1.",
    )


class WeightQuantizationShared(Section):
    """Settings shared by all groups of quantized weights."""

    enabled: bool = param(False, origin="DSC", doc="Quantize weights.")
    quantizer_kernel: bool = param(
        False,
        origin="DSC",
        resume="free",
        doc="Quantize with DeepSpeed's compiled kernel.",
    )
    schedule_offset: int = param(0, origin="DSC", ge=0, doc=_OFFSET)
    quantize_groups: int = param(
        1, origin="DSC", gt=0, doc="Number of groups per matrix; each has its own scale."
    )
    quantize_verbose: bool = param(False, origin="DSC", resume="free", doc="Log what is quantized.")
    quantization_type: Literal["symmetric", "asymmetric"] = param(
        "symmetric", origin="DSC", doc="symmetric: the range is centered at zero; asymmetric: it is not."
    )
    rounding: Literal["nearest", "stochastic"] = param(
        "nearest", origin="DSC", doc="Round to the nearest step, or up or down at random."
    )
    quantize_weight_in_forward: bool = param(
        False,
        origin="DSC",
        doc="Quantize in the forward pass instead of in the optimizer step; required in fp32 and with ZeRO.",
    )
    fp16_mixed_quantize: Fp16MixedQuantize = block(
        Fp16MixedQuantize, origin="DSC", doc="Gradual transition from 16-bit to quantized weights."
    )


class WeightQuantizationParams(Section):
    """Number of bits of one group of weights."""

    start_bits: int = param(origin="DSC", ge=1, le=32, doc="Number of bits at the start.")
    target_bits: int = param(origin="DSC", ge=1, le=32, doc="Number of bits at the end.")
    quantization_period: int = param(
        1, origin="DSC", gt=0, doc="Iterations between reductions of the number of bits."
    )


class WeightQuantizationGroup(Section):
    """One group of modules with quantized weights."""

    params: WeightQuantizationParams = block(origin="DSC", doc="Number of bits of the group.")
    modules: tuple[str, ...] = param(_ALL_MODULES, origin="DSC", min_length=1, doc=_MODULES)


class WeightQuantization(Section):
    """Quantization of weights."""

    shared_parameters: WeightQuantizationShared = block(WeightQuantizationShared, origin="DSC", doc=_SHARED)
    different_groups: dict[str, WeightQuantizationGroup] = named_blocks("group", origin="DSC", doc=_GROUPS)


class ActivationQuantizationShared(Section):
    """Settings shared by all groups of quantized activations."""

    enabled: bool = param(False, origin="DSC", doc="Quantize activations.")
    quantization_type: Literal["symmetric", "asymmetric"] = param(
        "symmetric", origin="DSC", doc="symmetric: the range is centered at zero; asymmetric: it is not."
    )
    range_calibration: Literal["dynamic", "static"] = param(
        "static", origin="DSC", doc="dynamic: one range per token; static: a running average."
    )
    schedule_offset: int = param(1000, origin="DSC", ge=0, doc=_OFFSET)


class ActivationQuantizationParams(Section):
    """Number of bits of one group of activations."""

    bits: int = param(origin="DSC", ge=4, le=32, doc="Number of bits per activation.")


class ActivationQuantizationGroup(Section):
    """One group of modules with quantized inputs."""

    params: ActivationQuantizationParams = block(origin="DSC", doc="Number of bits of the group.")
    modules: tuple[str, ...] = param(_ALL_MODULES, origin="DSC", min_length=1, doc=_MODULES)


class ActivationQuantization(Section):
    """Quantization of activations."""

    shared_parameters: ActivationQuantizationShared = block(
        ActivationQuantizationShared, origin="DSC", doc=_SHARED
    )
    different_groups: dict[str, ActivationQuantizationGroup] = named_blocks(
        "group", origin="DSC", doc=_GROUPS
    )


class DenseRatio(Section):
    """Density of one group."""

    dense_ratio: float = param(origin="DSC", ge=0, le=1, doc="Fraction of the weights to keep.")


class SparsePruningShared(Section):
    """Settings shared by all groups of sparse weights."""

    enabled: bool = param(False, origin="DSC", doc="Set individual weights to zero.")
    schedule_offset: int = param(1000, origin="DSC", ge=0, doc=_OFFSET)
    schedule_offset_end: int | None = param(
        None,
        origin="DSC",
        none_means="schedule_offset",
        ge=0,
        used_when=_SNIP,
        doc="Iteration from which the sparsity pattern is fixed.",
    )
    schedule_offset_stride: int = param(
        1, origin="DSC", gt=0, used_when=_SNIP, doc="Iterations between changes of the sparsity pattern."
    )
    method: Literal["l1", "topk", "snip_momentum"] = param(
        "l1",
        origin="DSC",
        doc="Which weights to remove. l1: the smallest magnitudes; topk: the lowest learned scores; "
        "snip_momentum: blocks by the running magnitude of weight times gradient.",
    )
    block_pattern: str = param(
        "4x1",
        origin="DSC",
        pattern=r"^[0-9]+[x:][0-9]+$",
        free_choice="for example 4x1 or 2:4",
        used_when=_SNIP,
        doc="Shape of the blocks that are pruned together (4x1), or N:M sparsity (2:4).",
    )
    dense_ratio: float = param(
        0.1, origin="DSC", gt=0, lt=1, used_when=_SNIP, doc="Fraction of all weights to keep."
    )
    excluded_modules: tuple[str, ...] = param(
        (), origin="DSC", used_when=_SNIP, doc="Names of modules that are not pruned."
    )


class SparsePruningGroup(Section):
    """One group of modules with sparse weights."""

    params: DenseRatio = block(origin="DSC", doc="Density of the group.")
    modules: tuple[str, ...] = param(_ALL_MODULES, origin="DSC", min_length=1, doc=_MODULES)


class SparsePruning(Section):
    """Pruning of individual weights."""

    shared_parameters: SparsePruningShared = block(SparsePruningShared, origin="DSC", doc=_SHARED)
    different_groups: dict[str, SparsePruningGroup] = named_blocks("group", origin="DSC", doc=_GROUPS)


class PruningGroup(Section):
    """One group of modules whose rows, heads or channels are pruned."""

    params: DenseRatio = block(origin="DSC", doc="Density of the group.")
    modules: tuple[str, ...] = param(_ALL_MODULES, origin="DSC", min_length=1, doc=_MODULES)
    related_modules: tuple[tuple[str, ...], ...] | None = param(
        None,
        origin="DSC",
        none_means="no other module is changed",
        doc="For each pattern of `modules`: the modules whose matching inputs or outputs are removed.",
    )


class RowPruningShared(Section):
    """Settings shared by all groups of pruned rows."""

    enabled: bool = param(False, origin="DSC", doc="Remove rows of the first of two linear layers.")
    schedule_offset: int = param(1000, origin="DSC", ge=0, doc=_OFFSET)
    method: Literal["l1", "topk"] = param(
        "l1",
        origin="DSC",
        doc="Which rows to remove. l1: the smallest norms; topk: the lowest learned scores.",
    )


class RowPruning(Section):
    """Pruning of rows of matrices."""

    shared_parameters: RowPruningShared = block(RowPruningShared, origin="DSC", doc=_SHARED)
    different_groups: dict[str, PruningGroup] = named_blocks("group", origin="DSC", doc=_GROUPS)


class HeadPruningShared(Section):
    """Settings shared by all groups of pruned heads."""

    enabled: bool = param(False, origin="DSC", doc="Remove attention heads.")
    schedule_offset: int = param(1000, origin="DSC", ge=0, doc=_OFFSET)
    method: Literal["topk"] = param(
        "topk", origin="DSC", doc="Which heads to remove: those with the lowest learned scores."
    )
    num_heads: int | None = param(
        None, origin="DSC", needed=True, gt=0, doc="Number of heads per layer before pruning."
    )


class HeadPruning(Section):
    """Pruning of attention heads."""

    shared_parameters: HeadPruningShared = block(HeadPruningShared, origin="DSC", doc=_SHARED)
    different_groups: dict[str, PruningGroup] = named_blocks("group", origin="DSC", doc=_GROUPS)


class ChannelPruningShared(Section):
    """Settings shared by all groups of pruned channels."""

    enabled: bool = param(False, origin="DSC", doc="Remove output channels of convolutions.")
    schedule_offset: int = param(1000, origin="DSC", ge=0, doc=_OFFSET)
    method: Literal["l1", "topk"] = param(
        "l1",
        origin="DSC",
        doc="Which channels to remove. l1: the smallest norms; topk: the lowest learned scores.",
    )


class ChannelPruning(Section):
    """Pruning of output channels of convolutions."""

    shared_parameters: ChannelPruningShared = block(ChannelPruningShared, origin="DSC", doc=_SHARED)
    different_groups: dict[str, PruningGroup] = named_blocks("group", origin="DSC", doc=_GROUPS)


class CompressionTraining(Section):
    """Methods of compressing the model during training."""

    layer_reduction: LayerReduction = block(
        LayerReduction, origin="DSC", doc="Initialize the model from layers of a larger model."
    )
    weight_quantization: WeightQuantization = block(
        WeightQuantization, origin="DSC", doc="Quantization of weights."
    )
    activation_quantization: ActivationQuantization = block(
        ActivationQuantization, origin="DSC", doc="Quantization of activations."
    )
    sparse_pruning: SparsePruning = block(SparsePruning, origin="DSC", doc="Pruning of individual weights.")
    row_pruning: RowPruning = block(RowPruning, origin="DSC", doc="Pruning of rows of matrices.")
    head_pruning: HeadPruning = block(HeadPruning, origin="DSC", doc="Pruning of attention heads.")
    channel_pruning: ChannelPruning = block(
        ChannelPruning, origin="DSC", doc="Pruning of output channels of convolutions."
    )


class CompressionSection(Section, resume="model"):
    """Model compression: quantization, pruning and layer reduction."""

    compression_training: CompressionTraining = block(
        CompressionTraining, origin="DSC", doc="Compress the model during training."
    )
