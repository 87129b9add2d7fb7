"""Write the norm of every gradient, the share of zero gradients, and the gradient noise scale."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from neox_model.checkpoint.outcome import collect
from neox_model.engine.contract import PendingUpdate, Update
from neox_model.metrics.noise_scale import AveragedNoiseScale, estimate
from neox_model.metrics.writers.base import MetricWriter
from neox_model.parallel.groups import Groups
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["GradientNormsHook", "NoiseScaleHook", "ZeroGradientsHook"]


class GradientNormsHook(Hook):
    """Writes `gradient_norms/NAME` of whole tensors, by logical name, once per interval.

    The gradients are averaged over micro-batches and data-parallel ranks, and not yet clipped.

    Args:
        update: the engine's update.
        groups: this rank's process groups.
        writers: receive the norms; empty on all ranks except one.
        interval: iterations between two writes.
        before_writing: called first, so that metrics are written in order.
    """

    def __init__(
        self,
        update: Update,
        groups: Groups,
        *,
        writers: Sequence[MetricWriter],
        interval: int,
        before_writing: Callable[[], None],
    ) -> None:
        self._groups = groups
        self._writers = writers
        self._interval = interval
        self._before_writing = before_writing
        self._iteration = 0
        self._norms: dict[str, Tensor] = {}
        update.before(self._measure)

    def on_start(self, state: TrainState) -> None:
        """Note the iteration at which this process starts."""
        self._iteration = state.iteration

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Write at the end of each interval. Collective over all ranks."""
        self._iteration = state.iteration
        if state.iteration % self._interval:
            return
        # None were measured if the batch was left out.
        measured, self._norms = self._norms, {}
        # The stages of one pipeline hold every tensor once.
        is_sent = self._groups.data.rank == 0 and self._groups.model.rank == 0
        norms = torch.stack(list(measured.values())).tolist() if is_sent and measured else []
        sent = dict(zip(measured, norms, strict=True)) if is_sent else {}
        found = {name: norm for stage in collect(self._groups.control, sent) for name, norm in stage.items()}
        self._before_writing()
        for writer in self._writers if found else ():
            writer.write({f"gradient_norms/{name}": norm for name, norm in found.items()}, state.iteration)

    def _measure(self, pending: PendingUpdate) -> None:
        if (self._iteration + 1) % self._interval == 0:
            self._norms = pending.tensor_norms()


class ZeroGradientsHook(Hook):
    """Writes the share of gradient elements equal to 0, as `optimizer/zero_gradients`, once per interval.

    Args:
        update: the engine's update.
        writers: receive the share; empty on all ranks except one.
        interval: iterations between two writes.
        before_writing: called first, so that metrics are written in order.
    """

    def __init__(
        self,
        update: Update,
        *,
        writers: Sequence[MetricWriter],
        interval: int,
        before_writing: Callable[[], None],
    ) -> None:
        self._writers = writers
        self._interval = interval
        self._before_writing = before_writing
        self._iteration = 0
        self._share: Tensor | None = None
        update.before(self._measure)

    def on_start(self, state: TrainState) -> None:
        """Note the iteration at which this process starts."""
        self._iteration = state.iteration

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Write at the end of each interval, unless its last batch was left out."""
        self._iteration = state.iteration
        share, self._share = self._share, None
        if share is None or not self._writers:
            return
        self._before_writing()
        metrics = {"optimizer/zero_gradients": share.item()}
        for writer in self._writers:
            writer.write(metrics, state.iteration)

    def _measure(self, pending: PendingUpdate) -> None:
        if (self._iteration + 1) % self._interval == 0:
            self._share = pending.zeros()


class NoiseScaleHook(Hook):
    """Estimates the gradient noise scale once per `count` updates, and writes it once per interval.

    The smaller batch is that of one update; the larger one that of `count` updates, whose gradients are
    summed. Updates whose gradients are not finite are left out. Writes `gradient_noise_scale/noise` and
    `gradient_noise_scale/signal`, and their ratio in samples as `gradient_noise_scale/simple` if both are
    positive. The averages start anew when a training is resumed.

    Args:
        update: the engine's update.
        count: number of updates per estimate, at least 2.
        on_host: keep the sum of the gradients in host memory.
        writers: receive the estimate; empty on all ranks except one.
        interval: iterations between two writes.
        before_writing: called first, so that metrics are written in order.
    """

    def __init__(
        self,
        update: Update,
        *,
        count: int,
        on_host: bool,
        writers: Sequence[MetricWriter],
        interval: int,
        before_writing: Callable[[], None],
    ) -> None:
        self._count = count
        self._on_host = on_host
        self._writers = writers
        self._interval = interval
        self._before_writing = before_writing
        self._sums: dict[str, Tensor] = {}
        self._seen = 0
        self._finite = torch.zeros(())
        self._squares = torch.zeros(())
        self._measured: list[tuple[Tensor, Tensor, Tensor]] = []
        self._average = AveragedNoiseScale()
        update.before(self._add)

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Write the average of all estimates so far at the end of each interval."""
        if state.iteration % self._interval or not self._measured:
            return
        measured = torch.stack([torch.stack(values) for values in self._measured]).tolist()
        self._measured.clear()
        metrics: dict[str, float] = {}
        for number, small_square, large_square in measured:
            # A window with less than two finite updates has no larger batch.
            if number >= 2:
                metrics = self._metrics(state.samples_per_iteration, int(number), small_square, large_square)
        self._before_writing()
        for writer in self._writers if metrics else ():
            writer.write(metrics, state.iteration)

    def _metrics(self, batch: int, number: int, small_square: float, large_square: float) -> dict[str, float]:
        found = self._average.add(
            estimate(small=batch, small_square=small_square, large=batch * number, large_square=large_square)
        )
        metrics = {"gradient_noise_scale/noise": found.noise, "gradient_noise_scale/signal": found.signal}
        if found.noise > 0 and found.signal > 0:
            metrics["gradient_noise_scale/simple"] = found.noise / found.signal
        return metrics

    def _add(self, pending: PendingUpdate) -> None:
        """Add the gradients of one update, without reading anything back from the device."""
        is_finite = torch.isfinite(pending.norm)
        if not self._sums:
            self._finite = self._squares = torch.zeros_like(pending.norm)
        for name, _, gradient in pending.weights():
            if name not in self._sums:
                # The gradient of a weight that was not trained before was zero.
                self._sums[name] = self._place(torch.zeros_like(gradient))
            self._sums[name].add_(self._place(torch.where(is_finite, gradient, 0.0)))
        self._squares = self._squares + torch.where(is_finite, pending.norm.square(), 0.0)
        self._finite = self._finite + is_finite.to(pending.norm.dtype)
        self._seen += 1
        if self._seen == self._count:
            self._finish(pending)

    def _finish(self, pending: PendingUpdate) -> None:
        norm = pending.norm_of(self._sums)
        number = self._finite.clamp(min=1.0)
        self._measured.append((self._finite, self._squares / number, (norm / number).square()))
        for total in self._sums.values():
            total.zero_()
        self._seen, self._finite, self._squares = 0, 0.0 * number, 0.0 * number

    def _place(self, values: Tensor) -> Tensor:
        return values.to("cpu") if self._on_host else values
