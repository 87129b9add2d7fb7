"""What `neox_model.pipelining_compat` uses of torch.distributed.pipelining."""

import inspect
import logging
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from neox_model.contracts.expect import expect, noting
from neox_model.pipelining_compat import PipelineChunk, log_no_schedules

__all__ = ["OVERRIDDEN"]

OVERRIDDEN = (
    "forward_one_chunk",
    "backward_one_chunk",
    "backward_weight_one_chunk",
    "backward_maybe_with_nosync",
    "get_fwd_recv_ops",
    "get_bwd_recv_ops",
    "_setup_forward_recv_info",
    "_setup_backward_recv_info",
)
"""Methods that torch's schedules call, and the private ones that they call in turn."""


def overridden_methods_take_torchs_arguments() -> None:
    """Check the arguments of the methods of PipelineStage that PipelineChunk overrides."""
    for name in OVERRIDDEN:
        torchs, _ = _arguments_of(getattr(PipelineStage, name))
        ours, has_rest = _arguments_of(getattr(PipelineChunk, name))
        # What follows is taken by *arguments and **named.
        taken = torchs[: len(ours)] if has_rest else torchs
        expect(taken, ours, f"the list of arguments of PipelineStage.{name}")


def _arguments_of(function: Any) -> tuple[list[str], bool]:
    parameters = inspect.signature(function).parameters.values()
    names = [one.name for one in parameters if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return names, any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters)


def gradients_of_weights_are_computed_after_those_of_inputs() -> None:
    """Check torch.distributed.pipelining._backward.stage_backward_weight."""
    module, inputs = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    output = module(inputs).tanh().sum()
    expected = torch.autograd.grad(output, [inputs, *module.parameters()], retain_graph=True)
    weights = list(module.parameters())
    (gradient,), groups = stage_backward_input([output], None, [inputs], iter(weights))
    expect([weight.grad for weight in weights], [None, None])
    stage_backward_weight(iter(weights), groups, retain_graph=True)
    torch.testing.assert_close((gradient, *(weight.grad for weight in weights)), expected)


def no_schedule_is_logged() -> None:
    """Check the logger torch.distributed.pipelining."""
    logger = logging.getLogger("torch.distributed.pipelining")
    before = logger.level
    log_no_schedules()
    schedules = logging.getLogger("torch.distributed.pipelining.schedules")
    expect(schedules.isEnabledFor(logging.ERROR), False)
    logger.setLevel(before)


def schedules_run_our_chunks_and_keep_no_memory_of_messages() -> None:
    """Check PipelineStage.args_recv_info, .grad_recv_info and .submod in a schedule."""
    _run_schedule("zero_bubble")


class _Part(nn.Module):
    """A layer; the last one returns the loss."""

    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(int(is_last))
        self.weight = nn.Parameter(torch.randn(3, 3, generator=generator))
        self.is_last = is_last

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = (inputs @ self.weight).tanh()
        return outputs.square().sum() if self.is_last else outputs


class _Watched(PipelineChunk):
    """Notes where messages are while none is under way."""

    before: list[str]

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        self.before = _devices(self)


def _run_schedule(name: str) -> None:
    """Run two micro-batches through two chunks, on one rank or on two, and compare with the whole model."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    inputs = torch.arange(12.0).view(4, 3) / 12
    parts = [_Part(is_last=False), _Part(is_last=True)]
    gradients = torch.autograd.grad(parts[1](parts[0](inputs)), [part.weight for part in parts])
    phases: list[str] = []
    collected: list[bool] = []

    hidden = torch.empty((2, 3), device="meta", requires_grad=True)
    chunks = [
        _Watched(
            parts[number],
            number,
            2,
            inputs=[hidden if number else torch.empty((2, 3), device="meta")],
            outputs=[torch.empty((), device="meta", requires_grad=True) if number else hidden],
            device=torch.device("cpu"),
            group=torch.distributed.group.WORLD,
            measure=noting(phases),
            after_weights=lambda: collected.append(True),
        )
        for number in range(rank, 2, size)
    ]
    settings: Any = {"n_microbatches": 2, "loss_fn": lambda loss, target: loss, "scale_grads": False}
    schedules: dict[str, Any] = {
        "1f1b": lambda: Schedule1F1B(chunks[0], **settings),
        "zero_bubble": lambda: ScheduleInterleavedZeroBubble(list(chunks), **settings),
    }
    given = (inputs,) if rank == 0 else ()
    is_last = rank == size - 1
    schedules[name]().step(*given, target=torch.zeros(4) if is_last else None, return_outputs=False)
    separate = {"1f1b": 0, "zero_bubble": 2}[name]
    expect(Counter(phases), {"backward_inner": (2 + separate) * len(chunks), "forward": 2 * len(chunks)})
    expect(len(collected), separate * len(chunks), "the number of separate gradients of weights")
    for chunk in chunks:
        expect({*chunk.before, *_devices(chunk)} <= {"meta"}, True, "messages without memory")
        torch.testing.assert_close(chunk.submod.weight.grad, gradients[chunk.stage_index])


def _devices(chunk: PipelineChunk) -> list[str]:
    """Return the devices of the messages' memory; none: torch has not made it."""
    infos = [*chunk.args_recv_info.values(), *chunk.grad_recv_info.values()]
    buffers = [message.buffer for received in infos for message in received]
    return sorted({buffer.device.type for buffer in buffers if buffer is not None})
