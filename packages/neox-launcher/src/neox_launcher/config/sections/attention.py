"""How each layer attends, and how it knows where tokens are."""

from typing import Any, Literal

from pydantic import field_validator

from neox_launcher.config.parameter import Section, block, param
from neox_launcher.config.sections.model import Fusion

__all__ = ["ATTENTION_TYPES", "AttentionSection", "SparsityConfig"]

ATTENTION_TYPES = (
    "global",
    "local",
    "sparse_fixed",
    "sparse_variable",
    "bslongformer",
    "bigbird",
    "gmlp",
    "amlp",
)


def _has(kinds: str) -> str:
    return f"attention_config has {kinds} layers"


class SparsityConfig(Section):
    """Block layouts of sparse layers; attention stays causal whatever is said here."""

    mode: Literal["dense", "fixed", "bigbird", "bslongformer", "variable"] = param(
        "fixed", origin="DSC", resume="free", doc="Not used: attention-config decides per layer."
    )
    block: int = param(
        16, origin="DSC", gt=0, doc="Side of the square blocks, in tokens; divides seq-length."
    )
    different_layout_per_head: bool = param(False, origin="DSC", doc="Use a different layout for each head.")
    num_local_blocks: int = param(
        4, origin="DSC", gt=0, used_when=_has("sparse_fixed or local"), doc="Blocks of one local window."
    )
    num_global_blocks: int = param(
        1,
        origin="DSC",
        gt=0,
        used_when=_has("sparse_fixed or bigbird"),
        doc="Blocks of a window that all later ones see.",
    )
    attention: Literal["unidirectional", "bidirectional"] = param(
        "bidirectional", origin="DSC", resume="free", doc="Not used: attention is causal."
    )
    horizontal_global_attention: bool = param(
        False, origin="DSC", resume="free", doc="Not used: attention is causal."
    )
    num_different_global_patterns: int = param(
        1,
        origin="DSC",
        gt=0,
        used_when=_has("sparse_fixed"),
        doc="Choices of global blocks that heads alternate between.",
    )
    num_random_blocks: int = param(
        0,
        origin="DSC",
        ge=0,
        used_when=_has("sparse_variable or bigbird"),
        doc="Random blocks of each row of blocks.",
    )
    local_window_blocks: tuple[int, ...] = param(
        (4,),
        origin="DSC",
        used_when=_has("sparse_variable"),
        doc="Sizes of successive local windows; the last repeats.",
    )
    global_block_indices: tuple[int, ...] = param(
        (0,),
        origin="DSC",
        used_when=_has("sparse_variable or bslongformer"),
        doc="Global blocks, or where ranges start.",
    )
    global_block_end_indices: tuple[int, ...] | None = param(
        None,
        origin="DSC",
        none_means="each index is one block",
        used_when=_has("sparse_variable or bslongformer"),
        doc="Where the ranges of global blocks end (exclusive).",
    )
    num_sliding_window_blocks: int = param(
        3,
        origin="DSC",
        gt=0,
        used_when=_has("bigbird, bslongformer or local"),
        doc="Width of the sliding window in blocks; half of it lies before a block. Of local layers where "
        "num_local_blocks is not given.",
    )

    @property
    def local_attention_blocks(self) -> int:
        """Width of `local` attention's window in blocks: the first of two settings that is given, else 4."""
        for name in ("num_local_blocks", "num_sliding_window_blocks"):
            if name in self.model_fields_set:
                return int(getattr(self, name))
        return 4

    @property
    def global_ranges(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of the listed global blocks."""
        starts, stops = self.global_block_indices, self.global_block_end_indices
        if stops is None:
            return tuple((start, start + 1) for start in starts)
        return tuple(zip(starts, stops, strict=False))


class AttentionSection(Section, resume="model"):
    """How each layer attends, and how it knows where tokens are."""

    attention_config: tuple[Any, ...] | None = param(
        None,
        origin="NeoX",
        none_means="every layer attends globally",
        free_choice=", ".join(ATTENTION_TYPES),
        doc='Attention type of every layer: [[["global", "local"], 6]] repeats both types six times; "all" '
        "instead of a count fills the model; a flat list names every layer.",
    )
    sparsity_config: SparsityConfig = block(
        SparsityConfig, origin="NeoX", doc="Block layouts of sparse layers."
    )
    pos_emb: Literal["learned", "rotary", "sinusoidal", "rpe", "alibi", "none"] = param(
        "learned",
        origin="NeoX",
        source="arXiv:2104.09864 (rotary), arXiv:1910.10683 (rpe), arXiv:2108.12409 (alibi)",
        doc="How the model learns the order of tokens.",
    )
    rpe_num_buckets: int = param(
        32,
        origin="NeoX",
        gt=1,
        used_when="pos_emb is rpe",
        doc="Classes of distance, each with a bias per head.",
    )
    rpe_max_distance: int = param(
        128,
        origin="NeoX",
        gt=1,
        used_when="pos_emb is rpe",
        doc="Distance from which all share the last class.",
    )
    rotary_pct: float = param(
        1.0,
        origin="NeoX",
        ge=0,
        le=1,
        used_when="pos_emb is rotary",
        source="arXiv:2104.09864",
        doc="Part of each head that is rotated; the rest passes through unchanged.",
    )
    rotary_emb_base: int = param(
        10000,
        origin="NeoX",
        gt=0,
        used_when="pos_emb is rotary",
        source="arXiv:2104.09864",
        doc="Base of the geometric series of rotation frequencies.",
    )
    rope_fusion: Fusion = param(
        False,
        origin="NeoX",
        resume="free",
        used_when="pos_emb is rotary",
        doc="Rotate queries and keys in one kernel; with auto where that is faster.",
    )
    scaled_upper_triang_masked_softmax_fusion: Fusion = param(
        False,
        origin="Meg",
        resume="free",
        doc="Scale, hide later tokens and apply softmax in one kernel, instead of PyTorch's attention. With "
        "auto only where scores are made anyway (layer scaling) and that is faster.",
    )
    scaled_masked_softmax_fusion: Fusion = param(
        False,
        origin="Meg",
        resume="free",
        doc="Scale, apply any mask and softmax in one kernel, instead of PyTorch's attention. With auto only "
        "where scores are made anyway (layer scaling) and that is faster.",
    )
    apply_query_key_layer_scaling: bool = param(
        False,
        origin="Meg",
        doc="Divide attention scores by the layer's number and multiply inside the softmax, against "
        "fp16 overflow; "
        "implies attention-softmax-in-fp32.",
    )
    attention_softmax_in_fp32: bool = param(
        False,
        origin="Meg",
        resume="free",
        doc="Compute the attention softmax in float32 whatever the precision; here it always is.",
    )

    @field_validator("attention_config", mode="after")
    @classmethod
    def _make_immutable(cls, value: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        return None if value is None else _as_tuples(value)


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list | tuple) else value
