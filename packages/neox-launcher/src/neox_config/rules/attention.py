"""Rules about attention: types, heads, sparse blocks, position embeddings, softmax."""

from collections.abc import Iterator

from neox_config.derive.attention_layers import expand_attention, types_in
from neox_config.derive.objective import is_encoder
from neox_config.derive.widths import head_width
from neox_config.facts.attention import ATTENTION_FACTS
from neox_config.pluralize import pluralize
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig


def attention_config_fits_the_layers(c: NeoXConfig) -> Iterator[Problem]:
    """Require attention_config to give every layer one known type."""
    try:
        expand_attention(c.attention.attention_config, c.model.num_layers)
    except ValueError as error:
        what, _, remedy = str(error).partition("; ")
        yield Problem("attention_config", what, remedy)


def rotary_turns_pairs_of_channels(c: NeoXConfig) -> Iterator[Problem]:
    """Require rotary embeddings to rotate an even number of each head's dimensions."""
    is_given = c.model.head_dim is not None
    if c.attention.pos_emb != "rotary" or (
        not is_given and c.model.hidden_size % c.model.num_attention_heads
    ):
        return
    width = head_width(c)
    rotated = int(width * c.attention.rotary_pct)
    if rotated % 2 or rotated == 0:
        yield Problem(
            "rotary_pct",
            f"rotates {rotated} of the {width} dimensions of each head; must be an even number, at least 2",
            "use 1, 0.5 or 0.25, or another head size"
            if width % 2 == 0
            else f"change {'head-dim' if is_given else 'hidden-size or num-attention-heads'}",
        )


def far_distances_share_buckets(c: NeoXConfig) -> Iterator[Problem]:
    """Require the last bucket to start beyond the half of the buckets that hold a single distance each."""
    attention = c.attention
    both_ways = is_encoder(c) and not attention.rpe_causal
    parts, share = (4, "a quarter") if both_ways else (2, "half")
    exact = attention.rpe_num_buckets // parts
    if attention.pos_emb == "rpe" and attention.rpe_max_distance <= exact:
        yield Problem(
            "rpe_max_distance",
            f"must be greater than {exact}, {share} of rpe-num-buckets: shorter distances have a bucket each",
            f"use more than {exact}",
        )


def patterns_of_global_blocks_fit_the_window(c: NeoXConfig) -> Iterator[Problem]:
    """Require the patterns of global blocks of all heads to fit into a fixed window."""
    sparsity = c.attention.sparsity_config
    window, seen, patterns = (
        sparsity.num_local_blocks,
        sparsity.num_global_blocks,
        sparsity.num_different_global_patterns,
    )
    if not any("num_different_global_patterns" in ATTENTION_FACTS[kind].settings for kind in types_in(c)):
        return
    name = "sparsity_config.num_different_global_patterns"
    if patterns * seen > window:
        yield Problem(
            name,
            f"times num_global_blocks is more than num_local_blocks: {window}",
            f"use at most {max(1, window // seen)}",
        )
    if patterns > 1 and not sparsity.different_layout_per_head:
        yield Problem(
            name,
            "requires different_layout_per_head: true if greater than 1",
            "set different_layout_per_head: true, or use 1",
        )


def listed_blocks_are_ranges(c: NeoXConfig) -> Iterator[Problem]:
    """Require valid sizes and indices of listed blocks, and ranges that end after they start."""
    sparsity = c.attention.sparsity_config
    starts, ends = sparsity.global_block_indices, sparsity.global_block_end_indices
    if not any("global_block_indices" in ATTENTION_FACTS[kind].settings for kind in types_in(c)):
        return
    if not sparsity.local_window_blocks or min(sparsity.local_window_blocks) < 1:
        yield Problem("sparsity_config.local_window_blocks", "must be a list of numbers >= 1", "use [4]")
    if any(start < 0 for start in starts):
        yield Problem("sparsity_config.global_block_indices", "must be a list of numbers >= 0", "use [0]")
    if ends is None:
        return
    name = "sparsity_config.global_block_end_indices"
    if len(ends) != len(starts):
        yield Problem(
            name,
            f"has {pluralize(len(ends), 'entry', 'entries')}, but global_block_indices has {len(starts)}",
            "give one end per start",
        )
    elif any(end <= start for start, end in zip(starts, ends, strict=True)):
        yield Problem(
            name,
            "has an end that is not after its start",
            "use larger ends; they are exclusive: start 0 with end 1 is one block",
        )
