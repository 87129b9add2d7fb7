"""Rules about precision."""

from collections.abc import Iterator

from neox_config.facts.fused_operators import FUSED_OPERATORS
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig


def one_precision(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse more than one of fp16, bf16 and amp."""
    enabled = [name for name in ("fp16", "bf16", "amp") if getattr(c.precision, name).enabled]
    if len(enabled) > 1:
        yield Problem(
            f"{enabled[1]}.enabled",
            f"cannot be combined with {enabled[0]}.enabled: true",
            "keep one of the two",
        )
    elif c.precision.amp.enabled and c.precision.precision not in (None, "fp32"):
        yield Problem(
            "amp.enabled",
            f"cannot be combined with precision: {c.precision.precision}: amp keeps weights in float32",
            "keep one of the two; amp.dtype is the data type of the products",
        )


def precision_agrees_with_the_blocks(c: NeoXConfig) -> Iterator[Problem]:
    """Require `precision` to agree with the fp16 and bf16 blocks."""
    named = c.precision.precision
    by_block = {"fp16": c.precision.fp16.enabled, "bfloat16": c.precision.bf16.enabled}
    enabled = [name for name, on in by_block.items() if on]
    if named is not None and enabled and named not in enabled:
        block = "bf16" if enabled[0] == "bfloat16" else enabled[0]
        yield Problem(
            "precision",
            f"contradicts {block}.enabled: true",
            f"keep one of the two, or set {block}.enabled to false",
        )
    given_off = (
        named in by_block
        and "enabled" in getattr(c.precision, "bf16" if named == "bfloat16" else "fp16").model_fields_set
    )
    if given_off and not by_block[str(named)]:
        yield Problem("precision", "contradicts the block with enabled: false", "keep one of the two")


def amp_excludes_zero(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse amp with ZeRO, as DeepSpeed does: its ZeRO optimizers scale losses for the fp16 block only."""
    if c.precision.amp.enabled and c.zero.zero_optimization.stage > 0:
        yield Problem("amp.enabled", "does not work with ZeRO", "use bf16 or fp16, or stage: 0")


_CAST_WEIGHTS = {
    "O2": "casts the weights to float16 and updates float32 copies of them, as the fp16 block does",
    "O3": "casts the weights to float16 without float32 copies, so that small updates are lost",
}


def amp_keeps_float32_weights(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse the opt levels of amp that cast the weights."""
    amp = c.precision.amp
    if amp.enabled and amp.opt_level in _CAST_WEIGHTS:
        yield Problem(
            "amp.opt_level",
            _CAST_WEIGHTS[amp.opt_level],
            "write fp16: {enabled: true} instead of the amp block, or set opt_level: O1",
        )


def amp_scales_between_its_limits(c: NeoXConfig) -> Iterator[Problem]:
    """Require the minimum of amp's loss scale to be at most its maximum."""
    amp = c.precision.amp
    if amp.enabled and (amp.min_loss_scale or 1.0) > amp.max_loss_scale:
        yield Problem(
            "amp.max_loss_scale",
            f"is less than the minimum of the loss scale, {amp.min_loss_scale or 1.0:g}",
            "set a larger max_loss_scale or a smaller min_loss_scale",
        )


def amp_uses_operators_of_pytorch(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse required fused operators with amp: each takes tensors of one data type."""
    if c.precision.autocast is None:
        return
    for name in FUSED_OPERATORS:
        if c.value_of(name) is True:
            yield Problem(
                name,
                "does not work with amp: the fused operator takes tensors of one data type",
                f"set {name.replace('_', '-')}: auto or false, or use bf16 or fp16 instead of amp",
            )


def gradients_are_summed_in_fp32_or_the_models_format(c: NeoXConfig) -> Iterator[Problem]:
    """Require gradients to be accumulated in fp32 or in the data type of training."""
    given = c.engine.data_types.grad_accum_dtype
    named = "fp16" if c.precision.is_fp16 else "bf16" if c.precision.is_bf16 else "fp32"
    if given not in (None, "fp32", named):
        yield Problem(
            "data_types.grad_accum_dtype",
            f"cannot be combined with training in {named}",
            "use fp32" if named == "fp32" else f"use fp32 or {named}",
        )


def fp16_cross_entropy_needs_fp16(c: NeoXConfig) -> Iterator[Problem]:
    """Require fp16 for computing the loss in float16."""
    if c.precision.fp16_lm_cross_entropy and not c.precision.is_fp16:
        yield Problem("fp16_lm_cross_entropy", "requires fp16", "enable fp16, or remove it")
