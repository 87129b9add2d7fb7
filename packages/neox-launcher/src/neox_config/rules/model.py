"""Rules about the layers: sizes, weight sharing and kernels."""

from collections.abc import Iterator

from neox_config.derive.attention_layers import attention_names, types_in
from neox_config.derive.layer_compilation import why_layers_stay_uncompiled
from neox_config.derive.layer_sharing import weight_owners
from neox_config.derive.widths import MLP_SIZES, mlp_width
from neox_config.facts.attention import GMLP_TYPES, WITHOUT_HEADS
from neox_config.facts.fused_operators import FUSED_OPERATORS
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig


def the_width_is_set_once(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse more than one parameter that sets the inner width of the feed-forward block."""
    given = [name for name in ("mlp_width", *MLP_SIZES) if c.value_of(name)]
    if len(given) > 1:
        first, *others = (name.replace("_", "-") for name in given)
        yield Problem(
            given[0],
            f"and {' and '.join(others)} set the same width",
            f"keep one of {first}, {', '.join(others)}",
        )


def the_width_is_positive(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse a size from which no inner width of the feed-forward block is left."""
    given = next((name for name in MLP_SIZES if c.value_of(name) is not None), None)
    if given is not None and mlp_width(c) == 0:
        yield Problem(given, "gives an MLP width of 0", f"set a larger {given.replace('_', '-')}")


def samples_fit_the_positions(c: NeoXConfig) -> Iterator[Problem]:
    """Require samples no longer than the maximum number of positions."""
    if c.model.seq_length > c.model.max_position_embeddings:
        yield Problem(
            "seq_length",
            f"is more than max-position-embeddings: {c.model.max_position_embeddings}",
            f"set max-position-embeddings: {c.model.seq_length}, or reduce seq-length",
        )


def shared_weights_fit(c: NeoXConfig) -> Iterator[Problem]:
    """Require layers that share weights to have the same kind of block: attention, or one other type."""
    model = c.model
    unique = model.num_unique_layers
    if unique is None or model.num_layers % unique or not types_in(c):
        return
    types = attention_names(c)
    owners = weight_owners(model.num_layers, unique, model.param_sharing_style) or ()
    for layer, owner in enumerate(owners):
        kinds = {types[layer], types[owner]}
        if len(kinds) > 1 and not kinds.isdisjoint(WITHOUT_HEADS):
            yield Problem(
                "num_unique_layers",
                f"gives layer {layer} ({types[layer]}) the weights of layer {owner} ({types[owner]}), "
                "which has different sublayers",
                "use another attention-config or param-sharing-style",
            )
            return


def norms_of_outputs_suit_the_layers(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse norms of outputs in layers whose sublayers are added together, or are not two."""
    model = c.model
    if model.norm_placement == "before":
        return
    refused = {
        "gpt-j-residual: true": model.gpt_j_residual,
        "apply-residual-connection-post-layernorm: true": model.apply_residual_connection_post_layernorm,
        "gmlp and amlp layers": not types_in(c).isdisjoint(GMLP_TYPES),
    }
    for what in (name for name, is_given in refused.items() if is_given):
        yield Problem("norm_placement", f"does not work with {what}", "set norm-placement: before")


def loss_fusion_needs_bf16_or_fp32(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse a required fused loss in float16, where all logits are stored so that the loss can be scaled."""
    if c.model.loss_fusion is True and c.precision.is_fp16:
        yield Problem("loss_fusion", "does not work with fp16", "set loss-fusion: auto, or train in bf16")


def exported_models_have_no_kernels(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse fused kernels with onnx-safe, because the ONNX exporter does not support them."""
    for name in FUSED_OPERATORS:
        if c.model.onnx_safe and c.value_of(name) is True:
            yield Problem(name, "does not work with onnx-safe: true", "set it to false, or to auto")


def compiled_layers_stay_as_they_are(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse compile: true with settings under which layers cannot be compiled."""
    reason = why_layers_stay_uncompiled(c)
    if c.model.compile is True and reason is not None:
        yield Problem("compile", f"does not work with {reason}", "set compile: auto, or false")
