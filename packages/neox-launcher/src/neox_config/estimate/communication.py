"""Communication: bytes sent by the busiest device with ring collectives, and the pipeline bubble."""

from dataclasses import dataclass
from math import ceil

from neox_config.estimate.memory import flowing_bytes
from neox_config.estimate.parameters import local_parameters
from neox_config.estimate.shapes import Layout, Shape
from neox_config.estimate.step import model_bytes, optimizer_bytes
from neox_config.facts.pipeline_schedules import idle_share

__all__ = ["Communication", "bubble_share", "communication_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Bytes that the busiest device sends per update, by process group."""

    data: int
    model: int
    pipe: int


def communication_bytes(shape: Shape, layout: Layout) -> Communication:
    """Return the bytes that the busiest device sends per update.

    Source: arXiv:1910.02054, section 7 (data parallel), arXiv:2104.04473, section 4.1 (pipeline).
    """
    return Communication(
        data=_data_bytes(shape, layout), model=model_bytes(shape, layout), pipe=_pipe_bytes(shape, layout)
    )


def _data_bytes(shape: Shape, layout: Layout) -> int:
    ends = {0, layout.stages - 1}
    local = max(local_parameters(shape, layout, stage) for stage in ends)
    joined = max(optimizer_bytes(shape, layout, stage, "data") for stage in ends)
    gathered, reduced = layout.element_bytes * local, layout.reduced_bytes * local
    # Stages 2 and 3 reduce after every micro-batch; stage 3 also gathers the weights twice per micro-batch.
    passes = {
        0: 2 * reduced,
        1: reduced + gathered,
        2: layout.accumulation * reduced + gathered,
        3: layout.accumulation * (reduced + 2 * gathered),
    }
    return _ring(passes[layout.zero_stage], layout.data_parallel) + joined


def _pipe_bytes(shape: Shape, layout: Layout) -> int:
    if layout.stages == 1:
        return 0
    # Of two stages, none sends both ways for all its chunks.
    at_ends = 0 if layout.stages > 2 else 2 if layout.schedule == "zbv" else 1
    messages = 2 * layout.chunks - at_ends
    sent = layout.accumulation * messages * flowing_bytes(shape, layout)
    tied = ceil(shape.vocab_size / layout.model_parallel) * shape.hidden_size if shape.is_tied else 0
    return sent + layout.reduced_bytes * tied


def _ring(sent: int, ranks: int) -> int:
    """Return the bytes that each rank sends in a reduce-scatter or all-gather of `sent` bytes."""
    return sent * (ranks - 1) // ranks


def bubble_share(layout: Layout) -> float:
    """Return the fraction of the time of an update that a pipeline stage is idle."""
    return idle_share(
        layout.schedule, stages=layout.stages, chunks=layout.chunks, micro_batches=layout.accumulation
    )
