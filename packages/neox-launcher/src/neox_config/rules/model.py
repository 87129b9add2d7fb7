"""Rules about the layers: sizes, weight sharing and kernels."""

from collections.abc import Iterator

from neox_config.derive.attention_layers import expand_attention, types_in
from neox_config.derive.layer_compilation import why_layers_stay_uncompiled
from neox_config.derive.layer_sharing import weight_owners
from neox_config.derive.widths import MLP_SIZES, mlp_width
from neox_config.facts.attention import GMLP_TYPES
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig

# Upper bound on the numbers of heads tried for the suggestion.
_MOST_HEADS = 100_000


def heads_divide_the_width(c: NeoXConfig) -> Iterator[Problem]:
    """Require the number of heads to divide the hidden size."""
    width, heads = c.model.hidden_size, c.model.num_attention_heads
    if width % heads:
        divisors = (count for count in range(1, min(width, _MOST_HEADS) + 1) if width % count == 0)
        near = sorted(sorted(divisors, key=lambda count: abs(count - heads))[:4])
        remedy = f"use {', '.join(map(str, near))}"
        yield Problem("num_attention_heads", f"does not divide hidden-size: {width}", remedy)


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


def shared_layers_come_out_even(c: NeoXConfig) -> Iterator[Problem]:
    """Require num_unique_layers to divide the number of layers."""
    unique = c.model.num_unique_layers
    if unique is not None and c.model.num_layers % unique:
        yield Problem(
            "num_unique_layers",
            f"does not divide num-layers: {c.model.num_layers}",
            f"use a divisor of {c.model.num_layers}",
        )


def shared_weights_fit(c: NeoXConfig) -> Iterator[Problem]:
    """Require layers that share weights to have the same kind of block: attention, gmlp or amlp."""
    model = c.model
    unique = model.num_unique_layers
    if unique is None or model.num_layers % unique or not types_in(c):
        return
    types = expand_attention(c.attention.attention_config, model.num_layers)
    owners = weight_owners(model.num_layers, unique, model.param_sharing_style) or ()
    for layer, owner in enumerate(owners):
        kinds = {types[layer], types[owner]}
        if len(kinds) > 1 and not kinds.isdisjoint(GMLP_TYPES):
            yield Problem(
                "num_unique_layers",
                f"gives layer {layer} ({types[layer]}) the weights of layer {owner} ({types[owner]}), "
                "which has different sublayers",
                "use another attention-config or param-sharing-style",
            )
            return


def one_residual_order(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse a parallel residual together with a residual taken after the norm."""
    if c.model.gpt_j_residual and c.model.apply_residual_connection_post_layernorm:
        yield Problem(
            "gpt_j_residual",
            "and apply-residual-connection-post-layernorm cannot both be true",
            "set one of them to false",
        )


def _fusion_requires(c: NeoXConfig, fusion: str, name: str, *values: str) -> Iterator[Problem]:
    """Require one of the values of a parameter of the model for a fused kernel."""
    value, allowed = getattr(c.model, name), " or ".join(values)
    if getattr(c.model, fusion) is True and value not in values:
        yield Problem(
            fusion,
            f"requires {name}: {allowed}, not {value}",
            f"set {fusion.replace('_', '-')}: false, or {name}: {allowed}",
        )


def bias_gelu_needs_gelu(c: NeoXConfig) -> Iterator[Problem]:
    """Require gelu for the fused bias-gelu kernel."""
    yield from _fusion_requires(c, "bias_gelu_fusion", "activation", "gelu")


def fused_gelu_adds_a_bias(c: NeoXConfig) -> Iterator[Problem]:
    """Require a bias for the fused bias-gelu kernel."""
    if c.model.bias_gelu_fusion is True and not c.model.use_bias_in_mlp:
        yield Problem("bias_gelu_fusion", "requires use-bias-in-mlp: true", "set bias-gelu-fusion: false")


def layernorm_fusion_needs_layernorm(c: NeoXConfig) -> Iterator[Problem]:
    """Require `layernorm` for the fused layer norm kernel; apexlayernorm selects a different kernel."""
    yield from _fusion_requires(c, "layernorm_fusion", "norm", "layernorm")


def layernorm_fusion_adds_a_bias(c: NeoXConfig) -> Iterator[Problem]:
    """Require a bias for the fused layer norm kernel."""
    if c.model.layernorm_fusion is True and not c.model.use_bias_in_norms:
        yield Problem("layernorm_fusion", "requires use-bias-in-norms: true", "set layernorm-fusion: false")


def rmsnorm_fusion_needs_rmsnorm(c: NeoXConfig) -> Iterator[Problem]:
    """Require `rmsnorm` for the fused RMS norm kernel."""
    yield from _fusion_requires(c, "rmsnorm_fusion", "norm", "rmsnorm")


def glu_fusion_needs_swiglu_or_geglu(c: NeoXConfig) -> Iterator[Problem]:
    """Require an activation that the fused gated kernel computes."""
    yield from _fusion_requires(c, "glu_fusion", "activation", "swiglu", "geglu")


def loss_fusion_needs_bf16_or_fp32(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse a required fused loss in float16, where all logits are stored so that the loss can be scaled."""
    if c.model.loss_fusion is True and c.precision.is_fp16:
        yield Problem("loss_fusion", "does not work with fp16", "set loss-fusion: auto, or train in bf16")


def exported_models_have_no_kernels(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse fused kernels with onnx-safe, because the ONNX exporter does not support them."""
    asked = {
        "bias_gelu_fusion": c.model.bias_gelu_fusion,
        "bias_dropout_fusion": c.model.bias_dropout_fusion,
        "layernorm_fusion": c.model.layernorm_fusion,
        "rmsnorm_fusion": c.model.rmsnorm_fusion,
        "glu_fusion": c.model.glu_fusion,
        "loss_fusion": c.model.loss_fusion,
        "rope_fusion": c.attention.rope_fusion,
        "scaled_upper_triang_masked_softmax_fusion": c.attention.scaled_upper_triang_masked_softmax_fusion,
        "scaled_masked_softmax_fusion": c.attention.scaled_masked_softmax_fusion,
    }
    for name, value in asked.items():
        if c.model.onnx_safe and value is True:
            yield Problem(name, "does not work with onnx-safe: true", "set it to false, or to auto")


def compiled_layers_stay_as_they_are(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse compile: true with settings under which layers cannot be compiled."""
    reason = why_layers_stay_uncompiled(c)
    if c.model.compile is True and reason is not None:
        yield Problem("compile", f"does not work with {reason}", "set compile: auto, or false")
