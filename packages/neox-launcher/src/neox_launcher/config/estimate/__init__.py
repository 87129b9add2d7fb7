"""What a training costs, from plain numbers: parameters, memory, operations, communication and time.

Everything follows from two records of `shapes.py`: `Shape` is the model, `Layout` is how it is run.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from neox_launcher.config.estimate.communication import Communication, bubble_share, communication_bytes
from neox_launcher.config.estimate.memory import Memory, activation_bytes_per_layer, device_memory
from neox_launcher.config.estimate.operations import flops_per_token
from neox_launcher.config.estimate.parameters import Weights, count_parameters, local_parameters
from neox_launcher.config.shapes import Layout, Shape

__all__ = [
    "Communication",
    "Estimate",
    "Memory",
    "Weights",
    "activation_bytes_per_layer",
    "bubble_share",
    "communication_bytes",
    "count_parameters",
    "device_memory",
    "estimate",
    "flops_per_token",
    "local_parameters",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """All that is known about one way to train.

    Args:
        parameters: by part.
        memory: of a device of each pipeline stage.
        flops_per_token: forward and backward pass, without recomputation.
        computed_flops_per_token: with it.
        bubble: part of the time that a stage waits for the others.
    """

    shape: Shape
    layout: Layout
    parameters: Mapping[str, int]
    memory: tuple[Memory, ...]
    flops_per_token: int
    computed_flops_per_token: int
    communication: Communication
    bubble: float

    @property
    def total_parameters(self) -> int:
        """Of the whole model."""
        return sum(self.parameters.values())

    @property
    def fullest_stage(self) -> int:
        """The pipeline stage whose devices need most."""
        return max(range(len(self.memory)), key=lambda stage: self.memory[stage].total)

    @property
    def tokens_per_iteration(self) -> int:
        """Of one update, over all devices."""
        return self.layout.samples * self.shape.seq_length

    @property
    def flops_per_iteration(self) -> int:
        """Of one update, over all devices, without recomputation."""
        return self.flops_per_token * self.tokens_per_iteration

    @property
    def computed_flops_per_iteration(self) -> int:
        """The same with recomputation."""
        return self.computed_flops_per_token * self.tokens_per_iteration

    def seconds_per_iteration(self, tflops_per_device: float) -> float:
        """At a measured speed, as training logs it: recomputation not counted, waiting included."""
        return self.flops_per_iteration / (tflops_per_device * 1e12 * self.layout.devices)


def estimate(shape: Shape, layout: Layout) -> Estimate:
    """Everything about training this model this way."""
    return Estimate(
        shape=shape,
        layout=layout,
        parameters=count_parameters(shape),
        memory=tuple(device_memory(shape, layout, stage) for stage in range(layout.stages)),
        flops_per_token=flops_per_token(shape),
        computed_flops_per_token=flops_per_token(shape, is_recomputed=layout.segment_layers is not None),
        communication=communication_bytes(shape, layout),
        bubble=bubble_share(layout),
    )
