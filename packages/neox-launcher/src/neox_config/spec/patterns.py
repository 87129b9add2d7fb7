"""Which keys a query sees, as plain frozen values: from the parameters and back."""

from dataclasses import dataclass
from typing import Any

from neox_config.derive.objective import sees_later_tokens
from neox_config.facts.attention import ATTENTION_FACTS, attention_type
from neox_config.schema.config import NeoXConfig
from neox_config.spec.values import of

__all__ = ["Blocks", "Pattern", "Window", "read_pattern"]

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A query sees a number of blocks before its block; all blocks are aligned to the start.

    Args:
        block: tokens of a block.
        before: number of blocks before that of the query; as many follow in layers that see later tokens.
    """

    block: int = of("sparsity_config.block")
    before: int = of("sliding_window_width", "sparsity_config.num_local_blocks")

    def blocks_per_query(self, blocks: float, *, both_ways: bool) -> float:
        """Return the blocks that a query is multiplied with, apart from the ends of the sequence."""
        return (2 if both_ways else 1) * self.before + 1

    def settings(self) -> Settings:
        """Return the parameters of `sparsity_config` that give it, for local layers."""
        # The window of local layers is the block of the query, and half of this number of blocks before it.
        return {"block": self.block, "num-local-blocks": max(1, 2 * self.before)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A layout of blocks of DeepSpeed's sparse attention. What a kind does not use has its default.

    Args:
        kind: sparse_fixed, sparse_variable, bslongformer or bigbird.
        block: tokens of a block.
        local_blocks: width of the windows of sparse_fixed.
        global_blocks: number of global blocks: at the end of each window, or at the start of the sequence.
        patterns: number of different positions of global blocks among heads.
        sliding_blocks: width of a sliding window.
        random_blocks: number of random blocks per row.
        windows: widths of the first windows; the last one is repeated.
        global_ranges: (start, stop) of listed global blocks.
        has_global_rows: global blocks see all blocks.
        is_per_head: heads have different layouts.
        seed: seed of the random blocks; 0 without these.
    """

    kind: str = of("attention_config")
    block: int = of("sparsity_config.block")
    local_blocks: int = of("sparsity_config.num_local_blocks", default=0)
    global_blocks: int = of("sparsity_config.num_global_blocks", default=0)
    patterns: int = of("sparsity_config.num_different_global_patterns", default=1)
    sliding_blocks: int = of("sparsity_config.num_sliding_window_blocks", default=0)
    random_blocks: int = of("sparsity_config.num_random_blocks", default=0)
    windows: tuple[int, ...] = of("sparsity_config.local_window_blocks", default=())
    global_ranges: tuple[tuple[int, int], ...] = of("sparsity_config.global_block_indices", default=())
    has_global_rows: bool = of("sparsity_config.horizontal_global_attention", default=False)
    is_per_head: bool = of("sparsity_config.different_layout_per_head", default=False)
    seed: int = of("seed", default=0)

    def blocks_per_query(self, blocks: float, *, both_ways: bool) -> float:
        """Return how many of the blocks of a sequence a query is multiplied with; without a window, all."""
        window: float = self.local_blocks or self.sliding_blocks
        if not window:
            window = sum(self.windows) / len(self.windows) if self.windows else blocks
        # Global blocks are at the end of each window of sparse_fixed, and once in other kinds.
        times = blocks / self.local_blocks if self.local_blocks else 1
        listed = sum(stop - start for start, stop in self.global_ranges)
        return window + times * self.global_blocks + listed + self.random_blocks

    def settings(self) -> Settings:
        """Return the parameters of `sparsity_config` that give it, and the seed if it is random."""
        names = {
            "num-local-blocks": self.local_blocks,
            "num-global-blocks": self.global_blocks,
            "num-different-global-patterns": self.patterns,
            "num-sliding-window-blocks": self.sliding_blocks,
            "num-random-blocks": self.random_blocks,
            "local-window-blocks": list(self.windows),
            "different-layout-per-head": self.is_per_head,
            "horizontal-global-attention": self.has_global_rows,
            "global-block-indices": [start for start, _ in self.global_ranges],
            "global-block-end-indices": [stop for _, stop in self.global_ranges],
        }
        used = ATTENTION_FACTS[self.kind].settings
        settings = {
            name: value
            for name, value in names.items()
            if name.replace("-", "_") in used and value is not False
        }
        return {"block": self.block, **settings, **({"seed": self.seed} if self.random_blocks else {})}


Pattern = Window | Blocks


def read_pattern(config: NeoXConfig, kind: str) -> Pattern | None:
    """Return the pattern of an attention type; None if queries see all keys, or all earlier ones."""
    sparsity, window = config.attention.sparsity_config, config.attention.sliding_window_width
    if kind == "local":
        return Window(block=sparsity.block, before=sparsity.local_attention_blocks // 2)
    if attention_type(kind) == "global":
        # A window that every sequence fits into hides nothing.
        if window is None or window >= config.model.max_position_embeddings - 1:
            return None
        return Window(block=1, before=window)
    has = set(ATTENTION_FACTS[kind].settings)
    draws = "num_random_blocks" in has and sparsity.num_random_blocks > 0
    return Blocks(
        kind=kind,
        block=sparsity.block,
        local_blocks=sparsity.num_local_blocks if "num_local_blocks" in has else 0,
        global_blocks=sparsity.num_global_blocks if "num_global_blocks" in has else 0,
        patterns=sparsity.num_different_global_patterns if "num_different_global_patterns" in has else 1,
        sliding_blocks=sparsity.num_sliding_window_blocks if "num_sliding_window_blocks" in has else 0,
        random_blocks=sparsity.num_random_blocks if draws else 0,
        windows=sparsity.local_window_blocks if "local_window_blocks" in has else (),
        global_ranges=sparsity.global_ranges if "global_block_indices" in has else (),
        has_global_rows=(
            "horizontal_global_attention" in has
            and sparsity.horizontal_global_attention
            and sees_later_tokens(config, kind)
        ),
        is_per_head=sparsity.different_layout_per_head and sparsity.can_differ_per_head(kind),
        seed=config.training.seed if draws else 0,
    )
