"""Communication: bytes sent by the busiest device with ring collectives, and the pipeline bubble."""

from dataclasses import dataclass
from math import ceil

from neox_config.estimate.memory import flowing_bytes
from neox_config.estimate.parameters import local_expert_parameters, local_parameters
from neox_config.estimate.setup import Setup
from neox_config.estimate.step import expert_bytes, model_bytes, optimizer_bytes
from neox_config.facts.pipeline_schedules import idle_share

__all__ = ["Communication", "bubble_share", "communication_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Bytes that the busiest device sends per update, by process group.

    Args:
        data: gradients and weights.
        model: of tensor parallelism.
        pipe: of pipelines.
        experts: rows of tokens, to the ranks with their experts and back.
    """

    data: int
    model: int
    pipe: int
    experts: int = 0


def communication_bytes(setup: Setup) -> Communication:
    """Return the bytes that the busiest device sends per update.

    Source: arXiv:1910.02054, section 7 (data parallel), arXiv:2104.04473, section 4.1 (pipeline).
    """
    return Communication(
        data=_data_bytes(setup),
        model=model_bytes(setup),
        pipe=_pipe_bytes(setup),
        experts=expert_bytes(setup),
    )


def _data_bytes(setup: Setup) -> int:
    ends = {0, setup.run.layout.stages - 1}
    joined = max(optimizer_bytes(setup, stage, "data") for stage in ends)
    return max(_reduced(setup, stage) for stage in ends) + joined


def _reduced(setup: Setup, stage: int) -> int:
    """Return the bytes that a device sends for gradients, and for weights that ZeRO gathers."""
    layout, of_experts = setup.run.layout, local_expert_parameters(setup, stage)
    others = local_parameters(setup, stage) - of_experts
    # Only the ranks that have the same experts reduce the gradients of these.
    sent = _ring(_messages_of(setup, of_experts), layout.data // layout.experts)
    return sent + _ring(_messages_of(setup, others), layout.data)


def _messages_of(setup: Setup, local: int) -> int:
    """Return the bytes per update of messages with the gradients, and with these weights, of a device."""
    gathered, reduced = setup.element_bytes * local, setup.reduced_bytes * local
    # Stages 2 and 3 reduce after every micro-batch; stage 3 also gathers the weights twice per micro-batch.
    passes = {
        0: 2 * reduced,
        1: reduced + gathered,
        2: setup.run.batch.accumulation * reduced + gathered,
        3: setup.run.batch.accumulation * (reduced + 2 * gathered),
    }
    return passes[setup.run.layout.zero]


def _pipe_bytes(setup: Setup) -> int:
    if setup.run.layout.stages == 1:
        return 0
    layout = setup.run.layout
    # Of two stages, none sends both ways for all its chunks.
    at_ends = 0 if layout.stages > 2 else 2 if layout.schedule == "zbv" else 1
    messages = 2 * layout.chunks - at_ends
    sent = setup.run.batch.accumulation * messages * flowing_bytes(setup)
    tied = ceil(setup.entries / layout.tensor) * setup.model.width if setup.model.is_tied else 0
    return sent + setup.reduced_bytes * tied


def _ring(sent: int, ranks: int) -> int:
    """Return the bytes that each rank sends in a reduce-scatter or all-gather of `sent` bytes."""
    return sent * (ranks - 1) // ranks


def bubble_share(setup: Setup) -> float:
    """Return the fraction of the time of an update that a pipeline stage is idle."""
    layout = setup.run.layout
    return idle_share(
        layout.schedule,
        stages=layout.stages,
        chunks=layout.chunks,
        micro_batches=setup.run.batch.accumulation,
    )
