"""Implement the contract of an engine with the schedules of torch.distributed.pipelining.

The update is ours (`updater.py`), as it is without a pipeline. What the stages pass to each other has
shapes that all of them know, so that no forward pass is needed to find them; they are exchanged once, and
again after `forget_shapes`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.optim import Optimizer

from neox_config.facts.pipeline_schedules import ScheduleName
from neox_config.spec.run import Batch, RunSpec
from neox_config.spec.update import UpdateSpec
from neox_model.assembly.as_stages import Chunk, StagedModel, build_stages
from neox_model.assembly.choices import DTYPES, computing_device
from neox_model.engine.base import CountingEngine
from neox_model.engine.build_sharded import build_sharded_stage
from neox_model.engine.build_updater import build_updater, share_masters
from neox_model.engine.contract import Engine, ForwardEngine, IsStopping, MicroBatch, never
from neox_model.engine.mean_loss import loss_and_weight, mean_over, mean_over_tokens
from neox_model.engine.updater import Updater
from neox_model.errors import ModelError
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.parallel.groups import Groups
from neox_model.parallel.sharded_stage import ShardedStage
from neox_model.pipelining_compat import PipelineChunk, log_no_schedules

__all__ = [
    "SCHEDULE_CLASSES",
    "TorchPipelineEngine",
    "TorchPipelineForward",
    "build",
    "build_forward",
    "build_stages",
]


def _schedule_1f1b(chunks: list[PipelineChunk], *, n_microbatches: int, **settings: Any) -> Any:
    (chunk,) = chunks
    # torch's 1F1B requires a micro-batch for every stage. With fewer, the passes are the same in both, and in
    # the same order on the first stage; a later one may hold more activations, of these few micro-batches.
    schedule = Schedule1F1B if n_microbatches >= chunk.num_stages else ScheduleGPipe
    return schedule(chunk, n_microbatches=n_microbatches, **settings)


# Name -> function of the chunks of a rank, and of settings of torch's class.
SCHEDULE_CLASSES: dict[ScheduleName, Callable[..., Any]] = {
    "1f1b": _schedule_1f1b,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class _Shapes(NamedTuple):
    """What the stages must know of micro-batches; no documents: 0."""

    batch: int
    length: int
    has_documents: int


def _shapes_of(inputs: Tensor | tuple[Tensor, ...]) -> _Shapes:
    given = (inputs,) if isinstance(inputs, Tensor) else inputs
    batch, length = given[0].shape
    return _Shapes(batch, length, int(len(given) == 3))


class TorchPipelineForward:
    """Evaluates a pipeline, forward only.

    Args:
        model: this stage's chunks.
        groups: this rank's process groups.
        dtype: dtype of the hidden states.
    """

    def __init__(self, model: StagedModel, groups: Groups, *, dtype: torch.dtype) -> None:
        self._staged = model
        self._groups = groups
        self._dtype = dtype
        self._device = next(model.parameters()).device
        self._shapes: _Shapes | None = None

    def forget_shapes(self) -> None:
        """Let the stages exchange the shapes of their activations again."""
        self._shapes = None

    def evaluate(
        self, micro_batches: Iterator[MicroBatch], count: int, is_stopping: IsStopping = never
    ) -> Tensor:
        """Return the mean loss over the tokens of `count` micro-batches.

        The first and last stages receive the micro-batches.
        """
        self._staged.eval()
        sums: list[Tensor] = []
        with torch.no_grad():
            # As many at a time as there are stages: all stages are busy, and few activations are in memory.
            for first in range(0, count, self._groups.pipe.size):
                length = min(self._groups.pipe.size, count - first)
                taken = list(islice(micro_batches, length))
                losses = self._forward(taken, length)
                # Only the last stage has losses.
                sums += [
                    loss_and_weight(loss, targets) for loss, (_, targets) in zip(losses, taken, strict=False)
                ]
                if is_stopping():
                    break
            return self._of_last_stage(partial(mean_over_tokens, self._groups.data, sums))

    def _forward(self, taken: list[MicroBatch], count: int) -> list[Tensor]:
        """Run micro-batches through all stages, and return their losses on the last one.

        Every rank walks through all passes of all stages in one order, and starts to send or receive a
        message at the same place of it, so that two ranks never wait for each other's next message.
        """
        shapes = self._agree(taken)
        own = {chunk.part: chunk for chunk in self._staged.own_chunks()}
        arrived: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        receiving: dict[tuple[int, int], list[distributed.Work]] = {}
        sending: list[distributed.Work] = []
        losses: list[Tensor] = []
        parts = len(self._staged.stages)
        passes = ((part, index) for part in range(parts) for index in range(count))
        for part, index in sorted(passes, key=lambda one: (one[0] + one[1], one[0])):
            chunk, following = own.get(part), (part + 1, index)
            if chunk is not None:
                for work in receiving.pop((part, index), ()):
                    work.wait()
                received = arrived.pop((part, index), ())
                inputs = _as_tuple(taken[index][0]) if part == 0 else received
                labels_BS, loss_mask_BS = taken[index][1] if chunk.is_last else (None, None)
                outputs = _as_tuple(chunk(*inputs, labels_BS=labels_BS, loss_mask_BS=loss_mask_BS))
                if chunk.is_last:
                    losses += outputs
                elif part + 1 in own:
                    arrived[following] = outputs
                else:
                    sending += [self._start(distributed.isend, one.contiguous(), part + 1) for one in outputs]
            elif part + 1 in own:
                messages = self._messages(own[part + 1], shapes)
                arrived[following] = tuple(torch.empty_like(one, device=self._device) for one in messages)
                receiving[following] = [
                    self._start(distributed.irecv, one, part) for one in arrived[following]
                ]
        for work in sending:
            work.wait()
        return losses

    def _start(self, operation: Callable[..., Any], tensor: Tensor, part: int) -> distributed.Work:
        """Start to send a tensor to the stage of another part, or to receive it from there."""
        group = self._groups.pipe
        rank = group.ranks[self._staged.stages[part]]
        work: distributed.Work | None = operation(tensor, rank, group=group.process_group)
        assert work is not None, "the rank is in the group"
        return work

    def _messages(self, chunk: Chunk, shapes: _Shapes) -> list[Tensor]:
        """Return what a chunk receives, as tensors without memory."""
        return self._passed_on(shapes, has_documents=bool(shapes.has_documents) and chunk.takes_documents)

    def _passed_on(self, shapes: _Shapes, *, has_documents: bool) -> list[Tensor]:
        return self._staged.sent_between(
            batch=shapes.batch, length=shapes.length, has_documents=has_documents, dtype=self._dtype
        )

    def _agree(self, taken: Sequence[MicroBatch]) -> _Shapes:
        """Return the shapes, which the first stage knows. Collective over the stages if they are new."""
        if self._shapes is None:
            known = _shapes_of(taken[0][0]) if self._staged.holds_first else _Shapes(0, 0, 0)
            if self._groups.pipe.size > 1:
                sent = torch.tensor(known, device=self._device)
                first = self._groups.pipe.ranks[self._staged.stages[0]]
                distributed.broadcast(sent, first, group=self._groups.pipe.process_group)
                known = _Shapes(*sent.tolist())
            self._shapes = known
        for inputs, _ in taken if self._staged.holds_first else ():
            if _shapes_of(inputs) != self._shapes:
                raise ModelError(
                    f"a micro-batch has {_shapes_of(inputs)}, but the pipeline expects {self._shapes}"
                )
        return self._shapes

    def _of_last_stage(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return a scalar that the last stage computes, float32. Collective."""
        pipe = self._groups.pipe
        found = torch.zeros((), device=self._device)
        if self._staged.holds_last:
            found += compute()
        if pipe.size > 1:
            distributed.broadcast(found, pipe.ranks[self._staged.stages[-1]], group=pipe.process_group)
        return found


class TorchPipelineEngine(CountingEngine, TorchPipelineForward):
    """Trains the chunks of a stage with a schedule of torch.

    Args:
        model: this stage's chunks.
        update: their update.
        groups: this rank's process groups.
        schedule: name of the schedule.
        accumulation: micro-batches per update.
        samples: samples per update, over all data-parallel ranks.
        dtype: dtype of the hidden states.
        sharded: the partition of the chunks; None if every replica holds them whole.
    """

    def __init__(
        self,
        model: StagedModel,
        update: Updater,
        groups: Groups,
        *,
        schedule: ScheduleName,
        accumulation: int,
        samples: int,
        dtype: torch.dtype,
        sharded: ShardedStage | None = None,
    ) -> None:
        CountingEngine.__init__(self, model, update, samples)
        TorchPipelineForward.__init__(self, model, groups, dtype=dtype)
        self._sharded = sharded
        self._name = schedule
        self._accumulation = accumulation
        # For micro-batches of these shapes.
        self._schedule: tuple[_Shapes, Any] | None = None
        self._losses: list[Tensor] = []
        log_no_schedules()

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return self._device

    def train_batch(self, micro_batches: Iterator[MicroBatch]) -> Tensor:
        """Run all micro-batches through all stages, and the update."""
        self._staged.train()
        with self._measure("data"):
            taken = list(micro_batches)
        schedule = self._schedule_for(self._agree(taken))
        inputs, targets = self._joined(taken)
        if self._sharded is not None:
            self._sharded.begin_passes()
        with self._measure("pipeline"):
            # The loss is the output of the last chunk; torch requires a target all the same.
            schedule.step(*inputs, target=targets.get("labels_BS"), return_outputs=False, **targets)
        losses, self._losses = self._losses, []
        with self._measure("step"):
            if self._sharded is not None:
                with self._measure("backward_allreduce"):
                    self._sharded.end_passes()
            self.update.mixed.step()
        self.advance()

        def mean() -> Tensor:
            total = torch.zeros((), device=self._device)
            for loss in losses:
                total += loss
            return mean_over(self._groups.data, total / len(losses))

        return self._of_last_stage(mean)

    def evaluate(
        self, micro_batches: Iterator[MicroBatch], count: int, is_stopping: IsStopping = never
    ) -> Tensor:
        """Return the mean loss over the tokens of `count` micro-batches, as TorchPipelineForward."""
        with nullcontext() if self._sharded is None else self._sharded.gathered():
            return super().evaluate(micro_batches, count, is_stopping)

    def _joined(self, taken: Sequence[MicroBatch]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Return the inputs and targets of all micro-batches, which the schedule divides again."""
        inputs: tuple[Tensor, ...] = ()
        targets: dict[str, Tensor] = {}
        if self._staged.holds_first:
            columns = zip(*(_as_tuple(inputs) for inputs, _ in taken), strict=True)
            inputs = tuple(torch.cat(column) for column in columns)
        if self._staged.holds_last:
            labels, masks = zip(*(targets for _, targets in taken), strict=True)
            targets = {"labels_BS": torch.cat(labels), "loss_mask_BS": torch.cat(masks)}
        return inputs, targets

    def _schedule_for(self, shapes: _Shapes) -> Any:
        """Return the schedule for micro-batches of these shapes; building one communicates between stages."""
        if self._schedule is None or self._schedule[0] != shapes:
            chunks = [self._stage(chunk, shapes) for chunk in self._staged.own_chunks()]
            settings = {"loss_fn": self._loss, "scale_grads": False}
            build = SCHEDULE_CLASSES[self._name]
            self._schedule = shapes, build(chunks, n_microbatches=self._accumulation, **settings)
        return self._schedule[1]

    def _stage(self, chunk: Chunk, shapes: _Shapes) -> PipelineChunk:
        """Return a chunk as torch's schedules see it."""
        loss = [torch.empty((), device="meta", requires_grad=True)]
        tokens = [torch.empty((shapes.batch, shapes.length), dtype=torch.long, device="meta")]
        given = bool(shapes.has_documents) and chunk.gives_documents
        following = self._passed_on(shapes, has_documents=given)
        return PipelineChunk(
            chunk,
            chunk.part,
            len(self._staged.stages),
            inputs=self._messages(chunk, shapes) if chunk.part else tokens,
            outputs=loss if chunk.is_last else following,
            device=self._device,
            group=self._groups.pipe.process_group,
            measure=lambda phase: self._measure(phase),
            after_weights=self.update.mixed.collect if self._sharded is None else self._sharded.collect,
        )

    def _loss(self, loss: Tensor, target: Tensor) -> Tensor:
        """Return this micro-batch's part of the mean, which the backward pass starts from."""
        self._losses.append(loss.detach())
        return self.update.guard(loss) / self._accumulation


def _as_tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else value


def build(
    run: RunSpec,
    update: UpdateSpec,
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LearningRateSchedule,
    *,
    groups: Groups,
) -> Engine:
    """Build the engine with our optimizer and schedule (see `build_engine`)."""
    assert isinstance(model, StagedModel)
    sharded = None
    if run.partitions_rows and groups.data.size > 1:
        sharded, applied = build_sharded_stage(run, update, model, optimizer, schedule, groups=groups)
    else:
        # Weights may have been initialized on the host.
        model.to(computing_device())
        ties = model.take_over_ties()
        applied = build_updater(run, update, model, optimizer, schedule, groups=groups, ties=ties)
        share_masters(applied.mixed, groups)
    return TorchPipelineEngine(
        model,
        applied,
        groups,
        schedule=run.layout.schedule,
        accumulation=run.batch.accumulation,
        samples=run.batch.whole,
        dtype=DTYPES[run.precision.weights],
        sharded=sharded,
    )


def build_forward(batch: Batch, model: nn.Module, *, groups: Groups) -> ForwardEngine:
    """Build a pipeline engine for evaluation only; the model keeps its dtype and device."""
    assert isinstance(model, StagedModel)
    return TorchPipelineForward(model, groups, dtype=next(model.parameters()).dtype)
