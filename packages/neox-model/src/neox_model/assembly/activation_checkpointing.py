"""Run a list of layers, with or without recomputing their activations in the backward pass.

Consecutive transformer layers are divided into segments of `checkpoint_num_layers`, each of which stores only
its input (torch's non-reentrant checkpoint). The plain model and pipeline stages share this code: DeepSpeed's
segments include the embedding and the head, and do not recompute segments that contain one of them.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from neox_config.facts.pipeline_schedules import most_passes_in_flight
from neox_config.spec.run import Layout
from neox_config.spec.run import Recomputation as Chosen
from neox_model.assembly.checkpoint_storage import InputStorage
from neox_model.layers.residual_layer import ResidualLayer
from neox_model.parallel.groups import SINGLE_RANK, Group

__all__ = ["Recomputation", "build_recomputation", "passes_in_flight", "run_layers"]

logger = logging.getLogger(__name__)

Layer = Callable[[Any], Any]


class Recomputation:
    """Runs segments of layers with activation recomputation.

    Args:
        segment_layers: transformer layers per segment.
        keeper: storage for the segments' inputs; None: keep them where they are.
        passes: maximum number of micro-batches with an outstanding backward pass, for the keeper's buffer.
        synchronizes: synchronize with the device before and after both passes of each segment.
        profiles: log the time of both passes of each segment; synchronizes too.
    """

    def __init__(
        self,
        *,
        segment_layers: int,
        keeper: InputStorage | None = None,
        passes: int = 1,
        synchronizes: bool = False,
        profiles: bool = False,
    ) -> None:
        self._segment_layers = segment_layers
        self._keeper = keeper
        self._passes = passes
        self._is_watched = synchronizes or profiles
        self._profiles = profiles

    def run(self, layers: Sequence[Layer], inputs: Any) -> Any:
        """Run the layers in order, transformer layers in segments."""
        parts, number = [], 0
        for is_recomputed, group in groupby(layers, key=lambda layer: isinstance(layer, ResidualLayer)):
            run_of = list(group)
            step = self._segment_layers if is_recomputed else len(run_of)
            parts += [(is_recomputed, run_of[first : first + step]) for first in range(0, len(run_of), step)]
        if self._keeper is not None:
            self._keeper.expect(self._passes * sum(is_segment for is_segment, _ in parts))
        for is_segment, part in parts:
            if not is_segment:
                inputs = _run(part, *_as_tuple(inputs))
                continue
            number += 1
            run = self._run_watched if self._is_watched else self._run_segment
            inputs = run(part, _as_tuple(inputs), f"segment {number}")
        return inputs

    def _run_segment(self, layers: Sequence[Layer], inputs: tuple[Tensor, ...], name: str) -> Any:
        with nullcontext() if self._keeper is None else self._keeper.hooks():
            # Pass each input as a separate argument: torch does not save tensors inside tuples.
            return checkpoint(_run, layers, *inputs, use_reentrant=False)

    def _run_watched(self, layers: Sequence[Layer], inputs: tuple[Tensor, ...], name: str) -> Any:
        hidden = inputs[0]
        began = _now(hidden.device)
        result = self._run_segment(layers, inputs, name)
        forward = _now(hidden.device) - began
        backward_began: list[float] = []

        def on_backward_start(gradient: Tensor) -> None:
            backward_began.append(_now(gradient.device))

        def on_backward_end(gradient: Tensor) -> None:
            backward = _now(gradient.device) - backward_began.pop()
            if self._profiles:
                logger.info(
                    "%s of %d recomputed layers: forward %.2f ms, backward with recomputation %.2f ms",
                    name,
                    len(layers),
                    1e3 * forward,
                    1e3 * backward,
                )

        _as_tuple(result)[0].register_hook(on_backward_start)
        if hidden.requires_grad:
            hidden.register_hook(on_backward_end)
        return result


def build_recomputation(chosen: Chosen, group: Group, *, passes: int) -> Recomputation | None:
    """Build the recomputation of layers; None if all activations are stored.

    Args:
        chosen: what is recomputed.
        group: tensor-parallel ranks, which divide the inputs of segments if that is chosen. With sequence
            parallelism, inputs are divided already.
        passes: most forward passes through the layers that wait for their backward pass.
    """
    if chosen.segment is None:
        return None
    keeper = None
    if chosen.partitions_inputs or chosen.inputs_on_host:
        keeper = InputStorage(
            group=group if chosen.partitions_inputs and not group.splits_sequence else SINGLE_RANK,
            in_host=chosen.inputs_on_host,
            slots=chosen.slots,
        )
    return Recomputation(
        segment_layers=chosen.segment,
        keeper=keeper,
        passes=passes,
        synchronizes=chosen.synchronizes,
        profiles=chosen.profiles,
    )


def passes_in_flight(layout: Layout, accumulation: int, pipe: Group) -> int:
    """Return the most forward passes, of all chunks of this stage, that wait for their backward pass."""
    return most_passes_in_flight(
        layout.schedule,
        stage=pipe.rank,
        stages=pipe.size,
        chunks=layout.chunks,
        micro_batches=accumulation,
    )


def run_layers(layers: Sequence[Layer], inputs: Any, *, recomputation: Recomputation | None) -> Any:
    """Run the layers in order.

    Args:
        layers: modules or functions, each applied to the output of the previous one.
        inputs: inputs of the first layer. What accompanies the first of them is copied, because a pipeline
            may receive the next document ids in the same memory, by which masks are recognized.
        recomputation: recomputes segments of layers; None stores all activations.
    """
    if not isinstance(inputs, Tensor):
        first, *others = inputs
        inputs = (first, *(each if each is None else each.clone() for each in others))
    if recomputation is None or not torch.is_grad_enabled():
        return _run(layers, *_as_tuple(inputs))
    return recomputation.run(layers, inputs)


def _run(layers: Sequence[Layer], *inputs: Tensor) -> Any:
    result: Any = inputs if len(inputs) > 1 else inputs[0]
    for layer in layers:
        result = layer(result)
    return result


def _as_tuple(inputs: Any) -> tuple[Tensor, ...]:
    return (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)


def _now(device: torch.device) -> float:
    """Synchronize with the device and return the time in seconds."""
    torch.get_device_module(device).synchronize()
    return time.perf_counter()
