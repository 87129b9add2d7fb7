"""Rules about what is built: heads, blocks of sparse attention, positions; `rules.py` runs them, too."""

from collections.abc import Iterator

from neox_launcher.config.attention_layers import expand_attention
from neox_launcher.config.layer_compilation import why_layers_stay_uncompiled
from neox_launcher.config.layer_sharing import weight_owners
from neox_launcher.config.problems import Problem
from neox_launcher.config.schema import NeoXConfig

__all__ = ["MODEL_RULES"]

_BLOCK_TYPES = {"local", "sparse_fixed", "sparse_variable", "bslongformer", "bigbird"}


def _attention_types(c: NeoXConfig) -> set[str]:
    """The types that layers have; none where attention_config itself is wrong."""
    try:
        return set(expand_attention(c.attention.attention_config, c.model.num_layers))
    except ValueError:
        return set()


def keys_are_shared_evenly(c: NeoXConfig) -> Iterator[Problem]:
    """Every key-value head serves the same number of query heads."""
    shared, heads = c.model.num_kv_heads, c.model.num_attention_heads
    if shared is not None and heads % shared:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        yield Problem(
            "num_kv_heads", f"does not divide num-attention-heads: {heads}", f"use one of {fitting}"
        )


def fused_gelu_adds_a_bias(c: NeoXConfig) -> Iterator[Problem]:
    """The kernel adds the bias that it is named for."""
    if c.model.bias_gelu_fusion is True and not c.model.use_bias_in_mlp:
        yield Problem("bias_gelu_fusion", "needs use-bias-in-mlp: true", "set bias-gelu-fusion: false")


def blocks_divide_the_samples(c: NeoXConfig) -> Iterator[Problem]:
    """A sample is a whole number of blocks."""
    block, length = c.attention.sparsity_config.block, c.model.seq_length
    if _BLOCK_TYPES & _attention_types(c) and length % block:
        near = [n for n in range(1, min(length, 1024) + 1) if length % n == 0]
        near = sorted(sorted(near, key=lambda n: abs(n - block))[:3])
        yield Problem(
            "sparsity_config.block",
            f"does not divide seq-length: {length}",
            f"use {', '.join(map(str, near))}",
        )


def global_blocks_divide_the_window(c: NeoXConfig) -> Iterator[Problem]:
    """A fixed window is a whole number of choices of global blocks, between which heads alternate."""
    sparsity = c.attention.sparsity_config
    window, seen, patterns = (
        sparsity.num_local_blocks,
        sparsity.num_global_blocks,
        sparsity.num_different_global_patterns,
    )
    if "sparse_fixed" not in _attention_types(c):
        return
    if window % seen:
        yield Problem(
            "sparsity_config.num_global_blocks",
            f"does not divide num_local_blocks: {window}",
            "use a divisor of it",
        )
    name = "sparsity_config.num_different_global_patterns"
    if patterns * seen > window:
        yield Problem(
            name,
            f"times num_global_blocks is more than num_local_blocks: {window}",
            f"use at most {max(1, window // seen)}",
        )
    if patterns > 1 and not sparsity.different_layout_per_head:
        yield Problem(name, "needs heads that differ", "set different_layout_per_head: true, or 1 here")


def listed_blocks_are_ranges(c: NeoXConfig) -> Iterator[Problem]:
    """Listed windows and global blocks are blocks; each range has its end after its start."""
    sparsity = c.attention.sparsity_config
    starts, ends = sparsity.global_block_indices, sparsity.global_block_end_indices
    if not {"sparse_variable", "bslongformer"} & _attention_types(c):
        return
    if not sparsity.local_window_blocks or min(sparsity.local_window_blocks) < 1:
        yield Problem("sparsity_config.local_window_blocks", "must be numbers from 1 on", "use [4]")
    if any(start < 0 for start in starts):
        yield Problem("sparsity_config.global_block_indices", "must be numbers from 0 on", "use [0]")
    if ends is None:
        return
    name = "sparsity_config.global_block_end_indices"
    if len(ends) != len(starts):
        yield Problem(
            name,
            f"has {len(ends)} numbers for {len(starts)} of global_block_indices",
            "give one end per start",
        )
    elif any(end <= start for start, end in zip(starts, ends, strict=True)):
        yield Problem(
            name, "has an end that is not after its start", "ends are exclusive: 1 after 0 is a block"
        )


def far_distances_share_buckets(c: NeoXConfig) -> Iterator[Problem]:
    """Half of the buckets are single distances; the last one begins beyond them."""
    attention = c.attention
    exact = attention.rpe_num_buckets // 2
    if attention.pos_emb == "rpe" and attention.rpe_max_distance <= exact:
        yield Problem(
            "rpe_max_distance",
            f"is within the {exact} distances that have a bucket of their own (half of rpe-num-buckets)",
            f"use more than {exact}",
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


def shared_weights_fit(c: NeoXConfig) -> Iterator[Problem]:
    """Layers with the same weights have the same parts: attention over heads, gmlp or amlp."""
    model = c.model
    unique = model.num_unique_layers
    if unique is None or model.num_layers % unique or not _attention_types(c):
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


MODEL_RULES = (
    shared_weights_fit,
    keys_are_shared_evenly,
    fused_gelu_adds_a_bias,
    blocks_divide_the_samples,
    global_blocks_divide_the_window,
    listed_blocks_are_ranges,
    far_distances_share_buckets,
    exported_models_have_no_kernels,
    compiled_layers_stay_as_they_are,
)
