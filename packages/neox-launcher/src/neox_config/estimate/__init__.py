"""Estimate the cost of training: parameters, memory, operations, communication and time.

Estimates are computed from two records of `shapes.py`: `Shape` describes the model, `Layout` how it is run.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from neox_config.estimate.communication import Communication, bubble_share, communication_bytes
from neox_config.estimate.memory import Memory, activation_bytes_per_layer, device_memory
from neox_config.estimate.operations import Convention, flops_per_token
from neox_config.estimate.parameters import Weights, count_parameters, local_parameters
from neox_config.estimate.shapes import Layout, Shape

__all__ = [
    "Communication",
    "Convention",
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
    """Estimate for one model and layout.

    Args:
        shape: the model.
        layout: how the model is run.
        device: type of the devices: cuda or cpu.
        parameters: number of parameters by part of the model.
        memory: memory of a device of each pipeline stage.
        flops_per_token: operations of forward and backward pass per token, without recomputation, with
            attention counted as if every token saw the whole sequence.
        causal_flops_per_token: the same without what the causal mask hides.
        computed_flops_per_token: `flops_per_token` with recomputation.
        communication: bytes sent per update.
        bubble: fraction of the time that a pipeline stage is idle.
    """

    shape: Shape
    layout: Layout
    device: str
    parameters: Mapping[str, int]
    memory: tuple[Memory, ...]
    flops_per_token: int
    causal_flops_per_token: int
    computed_flops_per_token: int
    communication: Communication
    bubble: float

    @property
    def total_parameters(self) -> int:
        """Number of parameters of the whole model."""
        return sum(self.parameters.values())

    @property
    def fullest_stage(self) -> int:
        """Pipeline stage whose devices need the most memory."""
        return max(range(len(self.memory)), key=lambda stage: self.memory[stage].total)

    @property
    def tokens_per_iteration(self) -> int:
        """Tokens per update over all devices."""
        return self.layout.samples * self.shape.seq_length

    @property
    def flops_per_iteration(self) -> int:
        """Operations per update over all devices, without recomputation."""
        return self.flops_per_token * self.tokens_per_iteration

    @property
    def computed_flops_per_iteration(self) -> int:
        """Operations per update over all devices, with recomputation."""
        return self.computed_flops_per_token * self.tokens_per_iteration

    def seconds_per_iteration(self, tflops_per_device: float) -> float:
        """Return the time per update at a speed as logged by training, which does not count recomputation."""
        return self.flops_per_iteration / (tflops_per_device * 1e12 * self.layout.devices)


def estimate(shape: Shape, layout: Layout, *, device: str = "cuda") -> Estimate:
    """Estimate the cost of training a model with a layout on devices of a type: cuda or cpu."""
    return Estimate(
        shape=shape,
        layout=layout,
        device=device,
        parameters=count_parameters(shape),
        memory=tuple(device_memory(shape, layout, stage, device=device) for stage in range(layout.stages)),
        flops_per_token=flops_per_token(shape),
        causal_flops_per_token=flops_per_token(shape, convention="causal"),
        computed_flops_per_token=flops_per_token(
            shape,
            is_recomputed=layout.segment_layers is not None,
            recomputes_attention=layout.recomputes_attention,
        ),
        communication=communication_bytes(shape, layout),
        bubble=bubble_share(layout),
    )
