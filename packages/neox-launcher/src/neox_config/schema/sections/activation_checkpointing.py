"""Activation checkpointing: recompute activations in the backward pass instead of storing them."""

from typing import Literal

from neox_config.schema.parameter import Section, param

__all__ = ["ActivationCheckpointingSection"]

_WHEN_ON = "checkpoint_activations is true"
_WHEN_FULL = "checkpoint_activations is true and checkpoint_granularity is full"


class ActivationCheckpointingSection(Section, resume="free"):
    """Activation checkpointing: which layers are recomputed, and where their inputs are stored."""

    checkpoint_activations: bool = param(
        False,
        origin="Meg",
        doc="Store only the input of each group of layers and recompute the other activations in the "
        "backward pass (see checkpoint_granularity).",
    )
    checkpoint_granularity: Literal["full", "selective"] = param(
        "full",
        origin="ours",
        used_when=_WHEN_ON,
        doc="full recomputes layers. selective recomputes only attention between its projections, whose "
        "scores and dropout take much memory and little time, and stores all other activations.",
    )
    checkpoint_num_layers: int = param(
        1, origin="Meg", gt=0, used_when=_WHEN_FULL, doc="Layers per group; only the group's input is stored."
    )
    recompute_gated_product: bool | Literal["auto"] = param(
        "auto",
        origin="ours",
        used_when="activation is gated",
        doc="Store up and gate of a gated feed-forward block, and compute their product again in the "
        "backward pass: one tensor of mlp_width less per layer. auto: where glu_fusion uses the fused "
        "kernel, which computes the product with the gradients, and layers are neither compiled nor "
        "recomputed. true: everywhere, and layers are not compiled. A matrix with an adapter, and matrices "
        "under compression_training, store their input.",
    )
    partition_activations: bool = param(
        False,
        origin="Meg",
        used_when=_WHEN_FULL,
        doc="Partition the stored inputs across the tensor-parallel ranks.",
    )
    contiguous_checkpointing: bool = param(
        False,
        origin="Meg",
        used_when="partition_activations is true",
        doc="Store the inputs in one contiguous buffer that is allocated once.",
    )
    checkpoint_in_cpu: bool = param(
        False, origin="Meg", used_when=_WHEN_FULL, doc="Store the inputs in host memory."
    )
    synchronize_each_layer: bool = param(
        False, origin="Meg", used_when=_WHEN_FULL, doc="Synchronize the device before and after each group."
    )
    profile_backward: bool = param(
        False,
        origin="Meg",
        used_when=_WHEN_FULL,
        doc="Log the times of the forward and the backward pass of each group.",
    )
    number_checkpoints: int | None = param(
        None,
        origin="DSC",
        gt=0,
        none_means="groups per pipeline stage * micro-batches in flight",
        used_when="contiguous_checkpointing is true",
        doc="Number of groups that the buffer can hold. May also be set in an activation_checkpointing "
        "block.",
    )
