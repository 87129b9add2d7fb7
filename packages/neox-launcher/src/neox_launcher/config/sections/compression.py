"""Smaller models: quantization, pruning and fewer layers, each by groups of modules."""

from typing import Literal

from neox_launcher.config.parameter import Section, block, named_blocks, param

__all__ = [
    "ActivationQuantization",
    "ChannelPruning",
    "CompressionSection",
    "CompressionTraining",
    "HeadPruning",
    "LayerReduction",
    "RowPruning",
    "SparsePruning",
    "WeightQuantization",
]

_SHARED = "Settings that all groups share."
_GROUPS = "Groups of modules with settings of their own, by a name of your choice."
_OFFSET = "Iteration from which it is applied."
_ALL_MODULES = ("*",)
_MODULES = 'Patterns of module names; "*" is every module of the kind that this handles.'
_SNIP = "method is snip_momentum"


class LayerReduction(Section):
    """A student that starts as some of its teacher's layers."""

    enabled: bool = param(False, origin="DSC", doc="Start from some layers of a larger model.")
    keep_number_layer: int | None = param(None, origin="DSC", needed=True, gt=0, doc="Layers of the student.")
    module_name_prefix: str | None = param(
        None,
        origin="DSC",
        none_means="other_module_name lists the modules",
        min_length=1,
        doc="What the names of the copied layers start with.",
    )
    teacher_layer: tuple[int, ...] | None = param(
        None,
        origin="DSC",
        needed=True,
        min_length=1,
        doc="Numbers of the teacher's layers to copy, in order.",
    )
    other_module_name: tuple[str, ...] | None = param(
        None,
        origin="DSC",
        none_means="module_name_prefix names the modules",
        doc="Full names of further modules to copy.",
    )


class Fp16MixedQuantize(Section):
    """Weights between 16-bit and quantized ones at first."""

    enabled: bool = param(False, origin="DSC", doc="Mix the two kinds of weights.")
    quantize_change_ratio: float = param(
        0.001, origin="DSC", gt=0, le=1, doc="First share of the quantized weights; it grows to 1."
    )


class WeightQuantizationShared(Section):
    """What all groups of quantized weights share."""

    enabled: bool = param(False, origin="DSC", doc="Quantize weights.")
    quantizer_kernel: bool = param(
        False,
        origin="DSC",
        resume="free",
        used_when="training is in fp16",
        doc="Quantize in a compiled kernel.",
    )
    schedule_offset: int = param(0, origin="DSC", ge=0, doc=_OFFSET)
    quantize_groups: int = param(
        1, origin="DSC", gt=0, doc="Number of groups per matrix; each has its own scale."
    )
    quantize_verbose: bool = param(False, origin="DSC", resume="free", doc="Report what is quantized.")
    quantization_type: Literal["symmetric", "asymmetric"] = param(
        "symmetric", origin="DSC", doc="Whether zero is the middle of the range."
    )
    rounding: Literal["nearest", "stochastic"] = param(
        "nearest", origin="DSC", doc="To the nearest step, or up or down by chance."
    )
    quantize_weight_in_forward: bool = param(
        False, origin="DSC", doc="Quantize in the forward pass, not in the update; required in fp32."
    )
    fp16_mixed_quantize: Fp16MixedQuantize = block(
        Fp16MixedQuantize, origin="DSC", doc="Weights between 16-bit and quantized ones at first."
    )


class WeightQuantizationParams(Section):
    """Bits of one group of weights."""

    start_bits: int = param(origin="DSC", ge=1, le=32, doc="Bits at first.")
    target_bits: int = param(origin="DSC", ge=1, le=32, doc="Bits at the end.")
    quantization_period: int = param(1, origin="DSC", gt=0, doc="Iterations that each number of bits lasts.")


class WeightQuantizationGroup(Section):
    """One group of quantized weights."""

    params: WeightQuantizationParams = block(origin="DSC", doc="Bits of the group.")
    modules: tuple[str, ...] = param(_ALL_MODULES, origin="DSC", min_length=1, doc=_MODULES)


class WeightQuantization(Section):
    """Weights in few bits."""

    shared_parameters: WeightQuantizationShared = block(WeightQuantizationShared, origin="DSC", doc=_SHARED)
    different_groups: dict[str, WeightQuantizationGroup] = named_blocks("group", origin="DSC", doc=_GROUPS)


class ActivationQuantizationShared(Section):
    """What all groups of quantized activations share."""

    enabled: bool = param(False, origin="DSC", doc="Quantize activations.")
    quantization_type: Literal["symmetric", "asymmetric"] = param(
        "symmetric", origin="DSC", doc="Whether zero is the middle of the range."
    )
    range_calibration: Literal["dynamic", "static"] = param(
        "static", origin="DSC", doc="A range for every token, or one that follows them slowly."
    )
    schedule_offset: int = param(1000, origin="DSC", ge=0, doc=_OFFSET)


class ActivationQuantizationParams(Section):
    """Bits of one group of activations."""

    bits: int = param(origin="DSC", ge=4, le=32, doc="Bits of an activation.")


class ActivationQuantizationGroup(Section):
    """One group of modules with quantized inputs."""

    params: ActivationQuantizationParams = block(origin="DSC", doc="Bits of the group.")
    modules: tuple[str, ...] = param(_ALL_MODULES, origin="DSC", min_length=1, doc=_MODULES)


class ActivationQuantization(Section):
    """Activations in few bits."""

    shared_parameters: ActivationQuantizationShared = block(
        ActivationQuantizationShared, origin="DSC", doc=_SHARED
    )
    different_groups: dict[str, ActivationQuantizationGroup] = named_blocks(
        "group", origin="DSC", doc=_GROUPS
    )


class DenseRatio(Section):
    """How much of one group is kept."""

    dense_ratio: float = param(origin="DSC", ge=0, le=1, doc="Share of the weights that is kept.")


class SparsePruningShared(Section):
    """What all groups of sparse weights share."""

    enabled: bool = param(False, origin="DSC", doc="Set single weights to zero.")
    schedule_offset: int = param(1000, origin="DSC", ge=0, doc=_OFFSET)
    schedule_offset_end: int | None = param(
        None,
        origin="DSC",
        none_means="schedule_offset",
        ge=0,
        used_when=_SNIP,
        doc="Iteration from which the pattern stays.",
    )
    schedule_offset_stride: int = param(
        1, origin="DSC", gt=0, used_when=_SNIP, doc="Iterations between changes of the pattern."
    )
    method: Literal["l1", "topk", "snip_momentum"] = param(
        "l1",
        origin="DSC",
        doc="Which weights go: the smallest, those with the smallest learnt scores, or blocks by the size of "
        "weight times gradient over time.",
    )
    block_pattern: str = param(
        "4x1",
        origin="DSC",
        pattern=r"^[0-9]+[x:][0-9]+$",
        free_choice="4x1 or 2:4, say",
        used_when=_SNIP,
        doc="Blocks that are pruned together (4x1), or how many of how many are (2:4).",
    )
    dense_ratio: float = param(
        0.1, origin="DSC", gt=0, lt=1, used_when=_SNIP, doc="Share of all weights that is kept."
    )
    excluded_modules: tuple[str, ...] = param(
        (), origin="DSC", used_when=_SNIP, doc="Names of modules that stay whole."
    )


class SparsePruningGroup(Section):
    """One group of sparse weights."""

    params: DenseRatio = block(origin="DSC", doc="How much of the group is kept.")
    modules: tuple[str, ...] = param(_ALL_MODULES, origin="DSC", min_length=1, doc=_MODULES)


class SparsePruning(Section):
    """Single weights that become zero."""

    shared_parameters: SparsePruningShared = block(SparsePruningShared, origin="DSC", doc=_SHARED)
    different_groups: dict[str, SparsePruningGroup] = named_blocks("group", origin="DSC", doc=_GROUPS)


class PruningGroup(Section):
    """One group of modules that lose rows, heads or channels."""

    params: DenseRatio = block(origin="DSC", doc="How much of the group is kept.")
    modules: tuple[str, ...] = param(_ALL_MODULES, origin="DSC", min_length=1, doc=_MODULES)
    related_modules: tuple[tuple[str, ...], ...] | None = param(
        None,
        origin="DSC",
        none_means="no other module is changed",
        doc="For each pattern of `modules`: the modules that lose the matching inputs or outputs.",
    )


class RowPruningShared(Section):
    """What all groups of pruned rows share."""

    enabled: bool = param(False, origin="DSC", doc="Remove rows of the first of two linear layers.")
    schedule_offset: int = param(1000, origin="DSC", ge=0, doc=_OFFSET)
    method: Literal["l1", "topk"] = param(
        "l1", origin="DSC", doc="Which rows go: the smallest, or those with the smallest learnt scores."
    )


class RowPruning(Section):
    """Matrices that lose rows."""

    shared_parameters: RowPruningShared = block(RowPruningShared, origin="DSC", doc=_SHARED)
    different_groups: dict[str, PruningGroup] = named_blocks("group", origin="DSC", doc=_GROUPS)


class HeadPruningShared(Section):
    """What all groups of pruned heads share."""

    enabled: bool = param(False, origin="DSC", doc="Remove attention heads.")
    schedule_offset: int = param(1000, origin="DSC", ge=0, doc=_OFFSET)
    method: Literal["topk"] = param(
        "topk", origin="DSC", doc="Which heads go: those with the smallest learnt scores."
    )
    num_heads: int | None = param(
        None, origin="DSC", needed=True, gt=0, doc="Heads of a layer before pruning."
    )


class HeadPruning(Section):
    """Layers that lose attention heads."""

    shared_parameters: HeadPruningShared = block(HeadPruningShared, origin="DSC", doc=_SHARED)
    different_groups: dict[str, PruningGroup] = named_blocks("group", origin="DSC", doc=_GROUPS)


class ChannelPruningShared(Section):
    """What all groups of pruned channels share."""

    enabled: bool = param(False, origin="DSC", doc="Remove output channels of convolutions.")
    schedule_offset: int = param(1000, origin="DSC", ge=0, doc=_OFFSET)
    method: Literal["l1", "topk"] = param(
        "l1", origin="DSC", doc="Which channels go: the smallest, or those with the smallest learnt scores."
    )


class ChannelPruning(Section):
    """Convolutions that lose channels."""

    shared_parameters: ChannelPruningShared = block(ChannelPruningShared, origin="DSC", doc=_SHARED)
    different_groups: dict[str, PruningGroup] = named_blocks("group", origin="DSC", doc=_GROUPS)


class CompressionTraining(Section):
    """Seven ways to make the model smaller while it trains."""

    layer_reduction: LayerReduction = block(
        LayerReduction, origin="DSC", doc="Start from some layers of a larger model."
    )
    weight_quantization: WeightQuantization = block(
        WeightQuantization, origin="DSC", doc="Weights in few bits."
    )
    activation_quantization: ActivationQuantization = block(
        ActivationQuantization, origin="DSC", doc="Activations in few bits."
    )
    sparse_pruning: SparsePruning = block(SparsePruning, origin="DSC", doc="Single weights become zero.")
    row_pruning: RowPruning = block(RowPruning, origin="DSC", doc="Matrices lose rows.")
    head_pruning: HeadPruning = block(HeadPruning, origin="DSC", doc="Layers lose attention heads.")
    channel_pruning: ChannelPruning = block(ChannelPruning, origin="DSC", doc="Convolutions lose channels.")


class CompressionSection(Section, resume="model"):
    """Smaller models by quantization, pruning and fewer layers."""

    compression_training: CompressionTraining = block(
        CompressionTraining, origin="DSC", doc="Make the model smaller while it trains."
    )
