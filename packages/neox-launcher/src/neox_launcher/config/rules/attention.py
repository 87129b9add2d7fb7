"""Rules about attention: types, heads, sparse blocks, positions, softmax."""

from collections.abc import Iterator

from neox_launcher.config.attention_layers import expand_attention, types_in
from neox_launcher.config.problems import Problem
from neox_launcher.config.schema import NeoXConfig

_BLOCK_TYPES = {"local", "sparse_fixed", "sparse_variable", "bslongformer", "bigbird"}


def attention_config_fits_the_layers(c: NeoXConfig) -> Iterator[Problem]:
    """attention_config gives every layer one known type."""
    try:
        expand_attention(c.attention.attention_config, c.model.num_layers)
    except ValueError as error:
        what, _, remedy = str(error).partition("; ")
        yield Problem("attention_config", what, remedy)


def keys_are_shared_evenly(c: NeoXConfig) -> Iterator[Problem]:
    """Every key-value head serves the same number of query heads."""
    shared, heads = c.model.num_kv_heads, c.model.num_attention_heads
    if shared is not None and heads % shared:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        yield Problem(
            "num_kv_heads", f"does not divide num-attention-heads: {heads}", f"use one of {fitting}"
        )


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


def rope_fusion_needs_rotary_positions(c: NeoXConfig) -> Iterator[Problem]:
    """Without rotary positions nothing is rotated."""
    if c.attention.rope_fusion is True and c.attention.pos_emb != "rotary":
        yield Problem(
            "rope_fusion",
            f"needs pos-emb: rotary, not {c.attention.pos_emb}",
            "set rope-fusion: false, or pos-emb: rotary",
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


def blocks_divide_the_samples(c: NeoXConfig) -> Iterator[Problem]:
    """A sample is a whole number of blocks."""
    block, length = c.attention.sparsity_config.block, c.model.seq_length
    if _BLOCK_TYPES & types_in(c) and length % block:
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
    if "sparse_fixed" not in types_in(c):
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
    if not {"sparse_variable", "bslongformer"} & types_in(c):
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
