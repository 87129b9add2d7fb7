"""What compression_training does to each matrix of the model, by logical name."""

import re
from collections.abc import Iterator, Mapping, Sequence

from neox_config.derive.attention_layers import attention_names
from neox_config.derive.widths import head_width, mlp_width
from neox_config.extras.compression.facts import GATED_MATRICES, HEADS_MATRICES, LAYER_MATRICES
from neox_config.extras.compression.fields import (
    ActivationQuantizationGroup,
    CompressionTraining,
    PruningGroup,
    SparsePruningGroup,
    WeightQuantizationGroup,
)
from neox_config.facts.activations import ACTIVATION_FACTS
from neox_config.facts.attention import ATTENTION_FACTS, attention_type
from neox_config.schema.config import NeoXConfig

__all__ = [
    "COMPRESSIONS",
    "CompressionGroup",
    "Membership",
    "compressed_matrices",
    "compresses",
    "compressible_matrices",
    "group_memberships",
    "kind_of",
    "matching",
    "matrix_shape",
]

COMPRESSIONS = (
    "weight_quantization",
    "activation_quantization",
    "sparse_pruning",
    "row_pruning",
    "head_pruning",
)
"""The parts of compression_training that change matrices."""

_EVERY_MODULE = "*"

CompressionGroup = WeightQuantizationGroup | ActivationQuantizationGroup | SparsePruningGroup | PruningGroup
# The name of a group and the group; without groups an empty name and None.
Membership = tuple[str, CompressionGroup | None]


def compresses(config: NeoXConfig) -> bool:
    """Return True if a part that changes matrices is enabled."""
    section = config.compression.compression_training
    return any(getattr(section, part).shared_parameters.enabled for part in COMPRESSIONS)


def compressible_matrices(config: NeoXConfig) -> list[str]:
    """Return the logical names of the matrices that can be compressed: those of transformer layers."""
    absent = () if ACTIVATION_FACTS[config.model.activation].is_gated else GATED_MATRICES
    if config.attention.attention_gate == "none":
        absent = (*absent, "attention.gate")
    kinds = map(attention_type, attention_names(config))
    return [
        f"layers.{layer}.{name}"
        for layer, kind in enumerate(kinds)
        if not ATTENTION_FACTS[kind].is_gmlp
        for name in LAYER_MATRICES
        if name not in absent
        if ATTENTION_FACTS[kind].has_heads or name not in HEADS_MATRICES
    ]


def kind_of(matrix: str) -> str:
    """Return a matrix's name in its layer, such as mlp.up."""
    return matrix.split(".", 2)[2]


def matrix_shape(config: NeoXConfig, matrix: str) -> tuple[int, int]:
    """Return the number of outputs and inputs of a whole matrix."""
    model = config.model
    width, inner = model.hidden_size, mlp_width(config)
    key_values = model.num_kv_heads or model.num_attention_heads
    heads, each = model.num_attention_heads, head_width(config)
    gate_width = heads * (each if config.attention.attention_gate == "element" else 1)
    shapes = {
        "attention.gate": (gate_width, width),
        "attention.qkv": ((heads + 2 * key_values) * each, width),
        "attention.dense": (width, heads * each),
        "mlp.down": (width, inner),
    }
    return shapes.get(kind_of(matrix), (inner, width))


def matching(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names in which a pattern is found, in their order; `*` matches every name.

    Args:
        patterns: regular expressions.
        names: logical names.

    Raises:
        re.error: a pattern is not a regular expression.
    """
    if _EVERY_MODULE in patterns:
        return list(names)
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


def compressed_matrices(
    section: CompressionTraining, names: Sequence[str]
) -> dict[str, dict[str, Membership]]:
    """Return what is done to each compressed matrix: its group in each part, by logical name.

    Args:
        section: the settings.
        names: logical names of the matrices that can be compressed.
    """
    found: dict[str, dict[str, Membership]] = {}
    for part in COMPRESSIONS:
        for key, group, members in group_memberships(section, names, part):
            for name in members:
                found.setdefault(name, {})[part] = (key, group)
    return found


def group_memberships(
    section: CompressionTraining, names: Sequence[str], part: str
) -> Iterator[tuple[str, CompressionGroup | None, list[str]]]:
    """Yield the groups of an enabled part, each with its name and the matrices that belong to it."""
    block = getattr(section, part)
    shared = block.shared_parameters
    if not shared.enabled:
        return
    finds_them = getattr(shared, "method", "") == "snip_momentum"
    # Only this method excludes modules.
    excluded = set(matching(shared.excluded_modules, names)) if finds_them else set()
    allowed = [name for name in names if name not in excluded]
    groups: Mapping[str, CompressionGroup] = block.different_groups
    if finds_them and not groups:
        yield "", None, allowed
    for key, group in groups.items():
        yield key, group, matching(group.modules, allowed)
