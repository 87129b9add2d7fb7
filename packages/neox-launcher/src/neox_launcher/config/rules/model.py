"""Rules about the layers: their widths, parts and kernels."""

from collections.abc import Iterator

from neox_launcher.config.attention_layers import expand_attention, types_in
from neox_launcher.config.layer_compilation import why_layers_stay_uncompiled
from neox_launcher.config.layer_sharing import weight_owners
from neox_launcher.config.problems import Problem
from neox_launcher.config.schema import NeoXConfig

# Nobody means more: so many are tried for the remedy.
_MOST_HEADS = 100_000


def heads_divide_the_width(c: NeoXConfig) -> Iterator[Problem]:
    """Every head has the same whole number of channels."""
    width, heads = c.model.hidden_size, c.model.num_attention_heads
    if width % heads:
        divisors = (count for count in range(1, min(width, _MOST_HEADS) + 1) if width % count == 0)
        near = sorted(sorted(divisors, key=lambda count: abs(count - heads))[:4])
        remedy = f"use {', '.join(map(str, near))}"
        yield Problem("num_attention_heads", f"does not divide hidden-size: {width}", remedy)


def samples_fit_the_positions(c: NeoXConfig) -> Iterator[Problem]:
    """A sample is no longer than the positions that the model knows."""
    if c.model.seq_length > c.model.max_position_embeddings:
        yield Problem(
            "seq_length",
            f"is more than max-position-embeddings: {c.model.max_position_embeddings}",
            f"set max-position-embeddings: {c.model.seq_length}, or a shorter seq-length",
        )


def shared_layers_come_out_even(c: NeoXConfig) -> Iterator[Problem]:
    """Sets of shared weights divide the layers."""
    unique = c.model.num_unique_layers
    if unique is not None and c.model.num_layers % unique:
        yield Problem(
            "num_unique_layers", f"does not divide num-layers: {c.model.num_layers}", "use a divisor of it"
        )


def shared_weights_fit(c: NeoXConfig) -> Iterator[Problem]:
    """Layers with the same weights have the same parts: attention over heads, gmlp or amlp."""
    model = c.model
    unique = model.num_unique_layers
    if unique is None or model.num_layers % unique or not types_in(c):
        return
    types = expand_attention(c.attention.attention_config, model.num_layers)
    owners = weight_owners(model.num_layers, unique, model.param_sharing_style) or ()
    for layer, owner in enumerate(owners):
        kinds = {types[layer], types[owner]}
        if len(kinds) > 1 and kinds & {"gmlp", "amlp"}:
            yield Problem(
                "num_unique_layers",
                f"gives layer {layer} ({types[layer]}) the weights of layer {owner} ({types[owner]}), "
                "which has other parts",
                "use another attention-config or param-sharing-style",
            )
            return


def one_residual_order(c: NeoXConfig) -> Iterator[Problem]:
    """The residual is taken after the norm or shared by both parts, not both."""
    if c.model.gpt_j_residual and c.model.apply_residual_connection_post_layernorm:
        yield Problem(
            "gpt_j_residual",
            "and apply-residual-connection-post-layernorm cannot both be true",
            "set one of them to false",
        )


def bias_gelu_needs_gelu(c: NeoXConfig) -> Iterator[Problem]:
    """The fused kernel knows gelu only."""
    if c.model.bias_gelu_fusion is True and c.model.activation != "gelu":
        yield Problem(
            "bias_gelu_fusion",
            f"needs activation: gelu, not {c.model.activation}",
            "set bias-gelu-fusion: false, or activation: gelu",
        )


def fused_gelu_adds_a_bias(c: NeoXConfig) -> Iterator[Problem]:
    """The kernel adds the bias that it is named for."""
    if c.model.bias_gelu_fusion is True and not c.model.use_bias_in_mlp:
        yield Problem("bias_gelu_fusion", "needs use-bias-in-mlp: true", "set bias-gelu-fusion: false")


def layernorm_fusion_needs_layernorm(c: NeoXConfig) -> Iterator[Problem]:
    """The kernel calculates layer norms, and apexlayernorm names another one for them."""
    if c.model.layernorm_fusion is True and c.model.norm != "layernorm":
        yield Problem(
            "layernorm_fusion",
            f"needs norm: layernorm, not {c.model.norm}",
            "set layernorm-fusion: false, or norm: layernorm",
        )


def exported_models_have_no_kernels(c: NeoXConfig) -> Iterator[Problem]:
    """The exporter knows none of this project's operators."""
    asked = {
        "bias_gelu_fusion": c.model.bias_gelu_fusion,
        "bias_dropout_fusion": c.model.bias_dropout_fusion,
        "layernorm_fusion": c.model.layernorm_fusion,
        "rope_fusion": c.attention.rope_fusion,
        "scaled_upper_triang_masked_softmax_fusion": c.attention.scaled_upper_triang_masked_softmax_fusion,
        "scaled_masked_softmax_fusion": c.attention.scaled_masked_softmax_fusion,
    }
    for name, value in asked.items():
        if c.model.onnx_safe and value is True:
            yield Problem(name, "does not work with onnx-safe: true", "set it to false, or to auto")


def compiled_layers_stay_as_they_are(c: NeoXConfig) -> Iterator[Problem]:
    """What is compiled has one shape, and its weights."""
    reason = why_layers_stay_uncompiled(c)
    if c.model.compile is True and reason is not None:
        yield Problem("compile", f"does not work with {reason}", "set compile: auto, or false")
