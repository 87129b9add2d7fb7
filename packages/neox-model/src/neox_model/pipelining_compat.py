"""What uses torch.distributed.pipelining beyond its documented interface.

It is not in `torch_compat.py`, because layers and optimizers are used without pipelines, whose import takes
a second.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_weight

__all__ = ["PipelineChunk", "log_no_schedules"]


class PipelineChunk(PipelineStage):
    """A part of a pipeline, whose messages are allocated when they are received.

    torch before 2.15 prepares memory for the messages of all micro-batches of a batch. Shapes are given, so
    that no forward pass is needed to find them.

    Args:
        module: the part of the model.
        part: its number.
        parts: number of parts of the model.
        inputs: what it receives, as tensors without memory; the first part: an input of the model.
        outputs: what it returns; the last part: the loss.
        device: device of the model.
        group: the stages.
        measure: context of each phase.
        after_weights: called when gradients of weights were computed apart from those of activations.
    """

    def __init__(
        self,
        module: nn.Module,
        part: int,
        parts: int,
        *,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        device: torch.device,
        group: ProcessGroup | None,
        measure: Callable[[str], AbstractContextManager[object]],
        after_weights: Callable[[], None],
    ) -> None:
        super().__init__(
            module, part, parts, device, input_args=tuple(inputs), output_args=tuple(outputs), group=group
        )
        self._measure = measure
        self._after_weights = after_weights

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        """Run the forward pass of a micro-batch."""
        with self._measure("forward"), _own_errors():
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **named)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
        """Run the backward pass of a micro-batch, or only that of its activations."""
        with self._measure("backward_inner"), _own_errors():
            super().backward_one_chunk(bwd_chunk_id, *arguments, **named)
        for received in (self.args_recv_info[bwd_chunk_id], self.grad_recv_info[bwd_chunk_id]):
            for message in received:
                if message.buffer is not None:
                    message.buffer = torch.empty_like(message.buffer, device="meta")

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the gradients of weights for a micro-batch."""
        with self._measure("backward_inner"), _own_errors():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
            self._after_weights()

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run a backward pass, with gradients that can be sent.

        Gradients of weights keep the graph: torch would release a node with the first of several weights that
        need it, and a weight that two layers share is such a one in both.
        """
        if backward_type == "weight":
            weights = list(self.submod.parameters())
            stage_backward_weight(iter(weights), bwd_kwargs["param_groups"], retain_graph=True)
            _settle_gradients(weights)
            return (), None
        gradients, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        return tuple(None if one is None else one.contiguous() for one in gradients), groups

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Return the operations that receive the inputs of a micro-batch."""
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Return the operations that receive the gradients of a micro-batch's outputs."""
        self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _allocate(self, messages: tuple[Any, ...]) -> None:
        for message in messages:
            if message.buffer is not None:
                message.buffer = torch.empty_like(message.buffer, device=self.device)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        with self._on_meta():
            super()._setup_forward_recv_info(num_microbatches, has_backward)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        with self._on_meta():
            super()._setup_backward_recv_info(num_microbatches)

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device


def _settle_gradients(weights: Sequence[nn.Parameter]) -> None:
    """Give every gradient separate memory with the strides of its weight, as a whole backward pass does.

    Weights that are added to each other receive the same memory, to which torch would add the gradients of
    the next micro-batch twice. Gradients of a transposed weight are transposed in memory, where torch's fused
    optimizers take them for those of other elements.
    """
    taken: set[int] = set()
    for weight in weights:
        gradient = weight.grad
        if gradient is None:
            continue
        if gradient.stride() != weight.stride() or gradient.data_ptr() in taken:
            gradient = weight.grad = torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
        taken.add(gradient.data_ptr())


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise errors of the model as they are, without torch's description of the tensors around them."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


def log_no_schedules() -> None:
    """Keep torch from logging the whole schedule when a stage fails; the error itself is reported."""
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
