"""What pipelining_compat uses of torch.distributed.pipelining takes our arguments and does what we expect.

`make test-contracts` runs these tests in any environment.
"""

import inspect
import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from neox_model.pipelining_compat import PipelineChunk, log_no_schedules
from support.distributed import run_ranks

# Methods that torch's schedules call, and the private ones that they call in turn.
OVERRIDDEN = [
    "forward_one_chunk",
    "backward_one_chunk",
    "backward_weight_one_chunk",
    "backward_maybe_with_nosync",
    "get_fwd_recv_ops",
    "get_bwd_recv_ops",
    "_setup_forward_recv_info",
    "_setup_backward_recv_info",
]


def names_of(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


def test_all_overridden_methods_are_listed():
    own = {name for name, value in vars(PipelineChunk).items() if inspect.isfunction(value)} - {"__init__"}
    assert own & set(dir(PipelineStage)) == set(OVERRIDDEN)


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_an_overridden_method_takes_torchs_arguments(name):
    torchs = names_of(getattr(PipelineStage, name))
    # What follows is taken by *arguments and **named.
    ours = names_of(getattr(PipelineChunk, name))
    has_rest = any(
        one.kind is inspect.Parameter.VAR_POSITIONAL
        for one in inspect.signature(getattr(PipelineChunk, name)).parameters.values()
    )
    assert ours == (torchs[: len(ours)] if has_rest else torchs)


def test_gradients_of_weights_are_computed_after_those_of_inputs():
    # _backward.stage_backward_weight
    module, inputs = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    output = module(inputs).tanh().sum()
    expected = torch.autograd.grad(output, [inputs, *module.parameters()], retain_graph=True)
    weights = list(module.parameters())
    (gradient,), groups = stage_backward_input([output], None, [inputs], iter(weights))
    assert [weight.grad for weight in weights] == [None, None]
    stage_backward_weight(iter(weights), groups, retain_graph=True)
    torch.testing.assert_close((gradient, *(weight.grad for weight in weights)), expected)


class Part(nn.Module):
    """A layer; the last one returns the loss."""

    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(int(is_last))
        self.weight = nn.Parameter(torch.randn(3, 3, generator=generator))
        self.is_last = is_last

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = (inputs @ self.weight).tanh()
        return outputs.square().sum() if self.is_last else outputs


def run_schedule(name: str) -> dict[str, Any]:
    """Run two micro-batches through two chunks, one on each rank."""
    rank = torch.distributed.get_rank()
    phases: list[str] = []
    collected: list[bool] = []

    def measure(phase: str) -> AbstractContextManager[None]:
        phases.append(phase)
        return nullcontext()

    class Watched(PipelineChunk):
        """Notes where messages are while none is under way."""

        before: list[str]

        def _setup_backward_recv_info(self, num_microbatches: int) -> None:
            super()._setup_backward_recv_info(num_microbatches)
            self.before = devices(self)

    hidden = torch.empty((2, 3), device="meta", requires_grad=True)
    chunk = Watched(
        Part(is_last=rank == 1),
        rank,
        2,
        inputs=[hidden if rank else torch.empty((2, 3), device="meta")],
        outputs=[torch.empty((), device="meta", requires_grad=True) if rank else hidden],
        device=torch.device("cpu"),
        group=torch.distributed.group.WORLD,
        measure=measure,
        after_weights=lambda: collected.append(True),
    )
    settings = {"n_microbatches": 2, "loss_fn": lambda loss, target: loss, "scale_grads": False}
    classes = {"1f1b": (Schedule1F1B, chunk), "zero_bubble": (ScheduleInterleavedZeroBubble, [chunk])}
    schedule_class, stages = classes[name]
    schedule: Any = schedule_class(stages, **settings)
    inputs = torch.arange(12.0).view(4, 3) / 12
    given = (inputs,) if rank == 0 else ()
    schedule.step(*given, target=torch.zeros(4) if rank else None, return_outputs=False)
    return {
        "gradient": chunk.submod.weight.grad.tolist(),
        "phases": sorted(phases),
        "collected": len(collected),
        "before": chunk.before,
        "after": devices(chunk),
    }


def devices(chunk: PipelineChunk) -> list[str]:
    """Return the devices of the messages' memory; none: torch has not made it."""
    infos = [*chunk.args_recv_info.values(), *chunk.grad_recv_info.values()]
    buffers = [message.buffer for received in infos for message in received]
    return sorted({buffer.device.type for buffer in buffers if buffer is not None})


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble"])
def test_a_schedule_runs_our_chunks_and_keeps_no_memory_of_messages(name):
    inputs = torch.arange(12.0).view(4, 3) / 12
    parts = [Part(is_last=False), Part(is_last=True)]
    parts[1](parts[0](inputs)).backward()
    separate = {"1f1b": 0, "zero_bubble": 2}[name]
    for part, found in zip(parts, run_ranks(run_schedule, size=2, name=name), strict=True):
        torch.testing.assert_close(torch.tensor(found["gradient"]), part.weight.grad)
        assert found["phases"] == ["backward_inner"] * (2 + separate) + ["forward"] * 2
        assert found["collected"] == separate
        assert set(found["before"]) | set(found["after"]) <= {"meta"}


def test_no_schedule_is_logged():
    logger = logging.getLogger("torch.distributed.pipelining")
    before = logger.level
    log_no_schedules()
    schedules = logging.getLogger("torch.distributed.pipelining.schedules")
    assert not schedules.isEnabledFor(logging.ERROR)
    logger.setLevel(before)
