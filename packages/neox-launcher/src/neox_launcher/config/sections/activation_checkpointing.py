"""Activation checkpointing: computing activations again in the backward pass instead of keeping them."""

from neox_launcher.config.parameter import Section, param

__all__ = ["ActivationCheckpointingSection"]

_WHEN_ON = "checkpoint_activations is true"


class ActivationCheckpointingSection(Section, resume="free"):
    """Which layers are recomputed, and where their inputs wait."""

    checkpoint_activations: bool = param(
        False,
        origin="Meg",
        doc="Keep only the inputs of groups of layers, and compute the rest again when needed.",
    )
    checkpoint_num_layers: int = param(
        1, origin="Meg", gt=0, used_when=_WHEN_ON, doc="Layers of a group; only its input is kept."
    )
    partition_activations: bool = param(
        False,
        origin="Meg",
        used_when=_WHEN_ON,
        doc="Each tensor-parallel rank keeps its share of the inputs.",
    )
    contiguous_checkpointing: bool = param(
        False,
        origin="Meg",
        used_when="partition_activations is true",
        doc="Keep the inputs in one buffer, allocated once.",
    )
    checkpoint_in_cpu: bool = param(
        False, origin="Meg", used_when=_WHEN_ON, doc="Keep the inputs in host memory."
    )
    synchronize_each_layer: bool = param(
        False, origin="Meg", used_when=_WHEN_ON, doc="Wait for the device before and after each group."
    )
    profile_backward: bool = param(
        False, origin="Meg", used_when=_WHEN_ON, doc="Log the time of each group's two passes."
    )
    number_checkpoints: int | None = param(
        None,
        origin="DSC",
        gt=0,
        none_means="the groups of a stage times the micro-batches it has under way",
        used_when="contiguous_checkpointing is true",
        doc="Groups that the buffer has room for; written inside the activation_checkpointing block.",
    )
