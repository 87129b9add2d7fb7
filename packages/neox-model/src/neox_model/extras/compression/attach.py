"""Attach compression to the matrices of a model, as `compression_training` says."""

from collections.abc import Sequence

from torch import nn

from neox_config.extras.compression.fields import (
    ActivationQuantizationGroup,
    CompressionTraining,
    PruningGroup,
    SparsePruningGroup,
    WeightQuantizationGroup,
)
from neox_config.extras.compression.matrices import Membership, group_memberships
from neox_config.extras.compression.matrices import compressed_matrices as configured_matrices
from neox_config.spec.run import RunSpec
from neox_model.extras.compression.matrices import (
    BitSchedule,
    Linear,
    MatrixCompression,
    PruningRule,
    compress_matrix,
)
from neox_model.extras.compression.pruning import Pruning
from neox_model.extras.compression.quantization import InputQuantizer, Rounding, WeightQuantizer
from neox_model.parallel.groups import SINGLE_RANK
from neox_model.parallel.linear import RowParallelLinear
from neox_model.parallel.logical import Logical, named_logical_modules

__all__ = ["attach_compression", "snip_rules"]


def attach_compression(model: nn.Module, run: RunSpec, *, trains: bool) -> None:
    """Let the compressed matrices of this rank compute with quantized and pruned weights and inputs.

    Call it while the model is built, where new parameters are allocated like its own.

    Args:
        model: the model, or a part of it.
        run: how it runs.
        trains: weights are quantized as configured; False: in the forward pass.
    """
    section = run.compression
    matrices = configured_matrices(section, run.compressible)
    in_forward = not trains or section.weight_quantization.shared_parameters.quantize_weight_in_forward
    for name, module in list(named_logical_modules(model)):
        if name not in matrices or not isinstance(module, Linear):
            continue
        memberships, quantizer, bits, inputs = matrices[name], None, None, None
        if "weight_quantization" in memberships:
            quantizer, bits = _weight_quantizer(
                name,
                module,
                memberships["weight_quantization"],
                section,
                in_forward=in_forward,
                seed=run.initialization.seed,
            )
        if "activation_quantization" in memberships:
            inputs = _input_quantizer(module, memberships["activation_quantization"], section)
        prunings, rules = _prunings(module, memberships, section)
        compression = MatrixCompression(
            quantizer=quantizer,
            bits=bits,
            inputs=inputs,
            inputs_offset=section.activation_quantization.shared_parameters.schedule_offset,
            prunings=prunings,
            rules=rules,
            stretches_periods=run.fusions.has_second_derivatives,
        )
        compress_matrix(module, compression)


def _weight_quantizer(
    name: str,
    module: Linear,
    membership: Membership,
    section: CompressionTraining,
    *,
    in_forward: bool,
    seed: int,
) -> tuple[WeightQuantizer, BitSchedule]:
    shared, (_, group) = section.weight_quantization.shared_parameters, membership
    assert isinstance(group, WeightQuantizationGroup)
    logical, mix = _logical(module), shared.fp16_mixed_quantize
    rows, columns = logical.shape
    top, side = logical.slices
    quantizer = WeightQuantizer(
        name,
        shape=(rows, columns),
        slices=(top, side),
        group=module.group,
        groups=shared.quantize_groups,
        rounding=Rounding(kind=shared.quantization_type, is_stochastic=shared.rounding == "stochastic"),
        in_forward=in_forward,
        seed=seed,
    )
    schedule = BitSchedule(
        offset=shared.schedule_offset,
        start=group.params.start_bits,
        target=group.params.target_bits,
        period=group.params.quantization_period,
        mix_ratio=mix.quantize_change_ratio if mix.enabled else None,
    )
    return quantizer, schedule


def _input_quantizer(module: Linear, membership: Membership, section: CompressionTraining) -> InputQuantizer:
    shared, (_, group) = section.activation_quantization.shared_parameters, membership
    assert isinstance(group, ActivationQuantizationGroup)
    return InputQuantizer(
        group.params.bits,
        Rounding(kind=shared.quantization_type),
        is_dynamic=shared.range_calibration == "dynamic",
        group=module.group if isinstance(module, RowParallelLinear) else SINGLE_RANK,
    )


def _prunings(
    module: Linear, memberships: dict[str, Membership], section: CompressionTraining
) -> tuple[dict[str, Pruning], dict[str, PruningRule]]:
    rows, columns = _logical(module).shape
    split = _logical(module).split_dim
    prunings: dict[str, Pruning] = {}
    rules: dict[str, PruningRule] = {}
    if "sparse_pruning" in memberships:
        rules["sparse"] = _sparse_rule(memberships["sparse_pruning"], section)
        prunings["sparse"] = _pruning(module, (rows, columns), rules["sparse"], split)
    if "row_pruning" in memberships:
        shared = section.row_pruning.shared_parameters
        rules["rows"] = _rule(memberships["row_pruning"], shared.method, shared.schedule_offset)
        prunings["rows"] = _pruning(module, (rows, 1), rules["rows"], split)
    if "head_pruning" in memberships:
        heads = section.head_pruning.shared_parameters
        assert heads.num_heads is not None, "required by a rule"
        rules["heads"] = _rule(memberships["head_pruning"], heads.method, heads.schedule_offset)
        prunings["heads"] = _pruning(module, (1, heads.num_heads), rules["heads"], split)
    return prunings, rules


def _pruning(module: Linear, shape: tuple[int, int], rule: PruningRule, split: int | None) -> Pruning:
    return Pruning(shape, split_dim=split, group=module.group, learned=rule.is_learned)


def _sparse_rule(membership: Membership, section: CompressionTraining) -> PruningRule:
    shared, (key, group) = section.sparse_pruning.shared_parameters, membership
    assert group is None or isinstance(group, SparsePruningGroup)
    end = shared.schedule_offset_end
    return PruningRule(
        method=shared.method,
        offset=shared.schedule_offset,
        ratio=shared.dense_ratio if group is None else group.params.dense_ratio,
        scope=key,
        end=shared.schedule_offset if end is None else end,
        stride=shared.schedule_offset_stride,
        pattern=shared.block_pattern,
    )


def snip_rules(section: CompressionTraining, compressible: Sequence[str]) -> dict[str, PruningRule]:
    """Return the rule of each group of weights that snip_momentum prunes, by name; on every stage alike."""
    if section.sparse_pruning.shared_parameters.method != "snip_momentum":
        return {}
    memberships = group_memberships(section, compressible, "sparse_pruning")
    return {key: _sparse_rule((key, group), section) for key, group, _ in memberships}


def _rule(membership: Membership, method: str, offset: int) -> PruningRule:
    _, group = membership
    assert isinstance(group, PruningGroup)
    return PruningRule(method=method, offset=offset, ratio=group.params.dense_ratio)


def _logical(module: Linear) -> Logical:
    logical: Logical = module.weight.logical  # type: ignore[attr-defined]
    return logical
