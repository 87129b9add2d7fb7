"""Estimate the cost of training: parameters, memory, operations, communication and time.

Estimates are computed from a `Setup`: the specifications of the model and the run, and other settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from neox_config.estimate.communication import Communication, bubble_share, communication_bytes
from neox_config.estimate.memory import Memory, activation_bytes_per_layer, device_memory
from neox_config.estimate.operations import Convention, flops_per_token
from neox_config.estimate.parameters import Weights, active_parameters, count_parameters, local_parameters
from neox_config.estimate.setup import Setup

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
    """Estimate for one setup.

    Args:
        setup: what is estimated.
        device: type of the devices: cuda or cpu.
        parameters: number of parameters by part of the model.
        active_parameters: number of those that a token uses, of experts only its own.
        memory: memory of a device of each pipeline stage.
        flops_per_token: operations of forward and backward pass per token, without recomputation, with
            attention counted as if every token saw the whole sequence.
        causal_flops_per_token: the same without what the causal mask hides.
        computed_flops_per_token: `flops_per_token` with recomputation.
        communication: bytes sent per update.
        bubble: fraction of the time that a pipeline stage is idle.
    """

    setup: Setup
    device: str
    parameters: Mapping[str, int]
    active_parameters: int
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
        return self.setup.samples * self.setup.run.batch.length

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
        return self.flops_per_iteration / (tflops_per_device * 1e12 * self.setup.devices)


def estimate(setup: Setup, *, device: str = "cuda") -> Estimate:
    """Estimate the cost of training on devices of a type: cuda or cpu."""
    model, stages, recomputation = setup.model, setup.run.layout.stages, setup.run.recomputation
    flops = partial(flops_per_token, model, entries=setup.entries, length=setup.run.batch.length)
    return Estimate(
        setup=setup,
        device=device,
        parameters=count_parameters(model, setup.entries),
        active_parameters=active_parameters(model, setup.entries),
        memory=tuple(device_memory(setup, stage, device=device) for stage in range(stages)),
        flops_per_token=flops(),
        causal_flops_per_token=flops(convention="causal"),
        computed_flops_per_token=flops(
            is_recomputed=recomputation.segment is not None, recomputes_attention=recomputation.attention
        ),
        communication=communication_bytes(setup),
        bubble=bubble_share(setup),
    )
