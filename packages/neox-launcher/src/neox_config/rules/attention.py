"""Rules about attention: types, heads, sparse blocks, position embeddings, softmax."""

from collections.abc import Iterator
from math import inf

from neox_config.derive.attention_layers import attention_names, of_kind, types_in
from neox_config.derive.objective import is_encoder
from neox_config.derive.widths import head_width
from neox_config.facts.attention import ATTENTION_FACTS
from neox_config.pluralize import pluralize
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig


def attention_config_fits_the_layers(c: NeoXConfig) -> Iterator[Problem]:
    """Require attention_config to give every layer one known type."""
    try:
        attention_names(c)
    except ValueError as error:
        what, _, remedy = str(error).partition("; ")
        yield Problem("attention_config", what, remedy)


def attention_kinds_override_what_layers_use(c: NeoXConfig) -> Iterator[Problem]:
    """Require kinds that layers have, with names of their own, and rotary settings where layers rotate."""
    if not types_in(c):
        return
    used = attention_names(c)
    for name, kind in c.attention.attention_kinds.items():
        block = f"attention_kinds.{name}"
        if name in ATTENTION_FACTS:
            yield Problem(block, "has the name of an attention type", "use another name")
        elif name not in used:
            yield Problem(block, "is the kind of no layer of attention-config", "remove it, or use it there")
        if kind.rotary_scaling.type is None and kind.rotary_scaling.model_fields_set:
            yield Problem(
                f"{block}.rotary_scaling", "has no effect without type", "set its type, or remove it"
            )
        has_rotary = c.attention.pos_emb == "rotary"
        for setting in kind.overrides().keys() - {"sliding_window_width"}:
            if not has_rotary:
                what = f"requires pos-emb: rotary of the model, not {c.attention.pos_emb}"
                yield Problem(f"{block}.{setting}", what, "remove it, or set pos-emb: rotary")
            elif setting != "pos_emb" and kind.pos_emb == "none":
                yield Problem(f"{block}.{setting}", "has no effect: pos-emb of the kind is none", "remove it")


def longrope_scales_each_pair(c: NeoXConfig) -> Iterator[Problem]:
    """Require a positive factor of short and of long sequences for each rotated pair of channels."""
    model = c.model
    if not types_in(c) or (model.head_dim is None and model.hidden_size % model.num_attention_heads):
        return
    pairs = int(head_width(c) * c.attention.rotary_pct) // 2
    prefixes = {f"attention_kinds.{name}.": name for name in c.attention.attention_kinds} | {"": ""}
    for prefix, name in prefixes.items():
        attention = of_kind(c, name).attention
        scaling = attention.rotary_scaling
        is_own = not prefix or scaling is not c.attention.rotary_scaling
        if attention.pos_emb != "rotary" or scaling.type != "longrope" or not is_own:
            continue
        for part in ("short_factor", "long_factor"):
            factors = getattr(scaling, part)
            is_valid = factors is not None and all(0 < each < inf for each in factors)
            if not is_valid or len(factors) != pairs:
                yield Problem(
                    f"{prefix}rotary_scaling.{part}",
                    f"must be a list of {pairs} numbers above 0, one per pair of rotated channels",
                    "copy the lists of the model that was extended, or change rotary-pct",
                )


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


def queries_and_keys_have_one_form_of_norm(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse use_qk_layernorm with qk_norm, and with keys that do not have the shape of queries."""
    attention, heads, keys = c.attention, c.model.num_attention_heads, c.model.num_kv_heads
    if not attention.use_qk_layernorm:
        return
    if attention.qk_norm != "none":
        what = f"and qk-norm: {attention.qk_norm} are two forms of the norm of queries and keys"
        yield Problem("use_qk_layernorm", what, "keep one of the two")
    if keys not in (None, heads):
        what = f"gives {heads} query heads and {keys} key-value heads the same norm, with a weight per head"
        yield Problem(
            "use_qk_layernorm", what, "use qk-norm: head or width instead, or leave out num-kv-heads"
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
