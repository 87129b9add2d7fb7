"""Measure tensors: norms of weights, optimizer states and gradients, zero gradients, the noise scale."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neox_model.checkpoint.logical import engine_fragments, is_written_here, optimizer_parts
from neox_model.checkpoint.replica_states import shared_weight
from neox_model.engine.contract import Engine, PendingUpdate
from neox_model.parallel.collectives import all_reduce
from neox_model.parallel.control import all_gather_object, gather_object
from neox_model.parallel.groups import Groups
from neox_model.train.callbacks.measurement import Measurement
from neox_model.train.run import Run

__all__ = [
    "GRADIENT_FIGURES",
    "GradientFigures",
    "GradientNoise",
    "TensorNorms",
    "estimate",
    "tensor_norms",
]

# Of the averages of the gradient noise scale.
_DECAY = 0.99


def tensor_norms(engine: Engine, groups: Groups, *, parameters: bool, states: bool) -> dict[str, float]:
    """Return the 2-norms of whole logical tensors, the same on every rank and in every layout. Collective.

    Args:
        engine: the engine; the norms are those of its master weights.
        groups: this rank's process groups.
        parameters: include every weight, as `param_norms/NAME`.
        states: include every optimizer state with a value per weight, as `optimizer_state_norms/NAME/STATE`.
    """
    squares: dict[str, float] = {}
    with engine.update.in_memory():
        for name, values in _pieces(engine, groups, parameters=parameters, states=states):
            square = torch.linalg.vector_norm(values, dtype=torch.float32).square().item()
            squares[name] = squares.get(name, 0.0) + square
    names = sorted({name for held in all_gather_object(groups.control, list(squares)) for name in held})
    totals = torch.tensor([squares.get(name, 0.0) for name in names], dtype=torch.float64)
    return dict(zip(names, all_reduce(totals, groups.control).sqrt().tolist(), strict=True))


def _pieces(
    engine: Engine, groups: Groups, *, parameters: bool, states: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's pieces; every element of the model is in exactly one piece of one rank."""
    for fragment in engine_fragments(engine):
        if not is_written_here(fragment, groups, splits_over_data=engine.update.splits_over_data):
            continue
        if parameters:
            yield f"param_norms/{fragment.name}", shared_weight(fragment, engine.update.optimizer)
        for part in optimizer_parts(fragment, engine.update.optimizer)[0] if states else ():
            yield f"optimizer_state_norms/{part.name}", part.values


class TensorNorms(Measurement):
    """Measures norms of weights and optimizer states.

    Args:
        interval: iterations between two measurements.
        parameters: include every weight.
        states: include every optimizer state with a value per weight.
    """

    def __init__(self, interval: int, *, parameters: bool, states: bool) -> None:
        super().__init__(interval)
        self._parameters, self._states = parameters, states

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if `log_param_norm` or `log_optimizer_states` is set."""
        section = run.config.logging
        parameters, states = section.log_param_norm, section.log_optimizer_states
        if not (parameters or states):
            return None
        return cls(section.log_interval, parameters=parameters, states=states)

    def measure(self) -> dict[str, float]:
        """Return the norms. Collective over all ranks."""
        return tensor_norms(
            self.run.engine, self.run.groups, parameters=self._parameters, states=self._states
        )


GRADIENT_FIGURES: Mapping[str, Callable[[PendingUpdate], dict[str, Tensor]]] = {
    "log_grad_norm": lambda pending: {
        f"gradient_norms/{name}": norm for name, norm in pending.tensor_norms().items()
    },
    "log_grad_pct_zeros": lambda pending: {
        f"pct_grad_zeros/{name}": 100.0 * share for name, share in pending.tensor_zeros().items()
    },
    "log_zero_gradients": lambda pending: {"optimizer/zero_gradients": pending.zeros()},
}
"""Parameter -> what it measures of the gradients of an update, by metric."""


class GradientFigures(Measurement):
    """Measures figures of whole gradients in the last update of an interval.

    Args:
        interval: iterations between two measurements.
        figures: those of `GRADIENT_FIGURES`.
    """

    def __init__(self, interval: int, figures: Sequence[str]) -> None:
        super().__init__(interval)
        self._figures = figures
        self._kept: dict[str, Tensor] = {}

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if a parameter requests it and the engine shows gradients."""
        section = run.config.logging
        asked = [name for name in GRADIENT_FIGURES if getattr(section, name)]
        if not asked or "before_update" not in run.resolved.run.engine.offers:
            return None
        found = cls(section.log_interval, asked)
        run.engine.update.before(found._look)
        return found

    def measure(self) -> dict[str, float]:
        """Return the values on rank 0, none if the batch was left out. Collective over all ranks."""
        measured, self._kept = self._kept, {}
        # The stages of one pipeline hold every tensor once.
        groups = self.run.groups
        is_sent = groups.data.rank == 0 and groups.model.rank == 0
        values = torch.stack(list(measured.values())).tolist() if is_sent and measured else []
        sent = dict(zip(measured, values, strict=True)) if is_sent else {}
        stages = gather_object(groups.control, sent)
        return {name: value for stage in stages for name, value in stage.items()}

    def _look(self, pending: PendingUpdate) -> None:
        if self.is_due(self.run.state.iteration + 1):
            for name in self._figures:
                self._kept |= GRADIENT_FIGURES[name](pending)


def estimate(*, small: int, small_square: float, large: int, large_square: float) -> NDArray[np.float64]:
    """Return unbiased estimates, whose ratio is the simple noise scale, in samples: noise and signal.

    The noise is the trace of the covariance of the gradient of one sample, the signal the squared norm of the
    expected gradient. A single estimate may be negative. The noise scale estimates the largest batch size
    that still saves training steps.

    Source: McCandlish et al., An Empirical Model of Large-Batch Training (arXiv:1812.06162), appendix A.1.

    Args:
        small: number of samples of the smaller batch.
        small_square: squared norm of its gradient, or the mean over several such batches.
        large: number of samples of the larger batch.
        large_square: squared norm of its gradient.
    """
    noise = (small_square - large_square) / (1 / small - 1 / large)
    return np.array([noise, (large * large_square - small * small_square) / (large - small)])


class GradientNoise(Measurement):
    """Estimates the gradient noise scale once per `count` updates.

    The smaller batch is that of one update; the larger one that of `count` updates, whose gradients are
    summed. Updates whose gradients are not finite are left out. The averages start anew when a run is
    resumed.

    Args:
        count: number of updates per estimate, at least 2.
        on_host: keep the sum of the gradients in host memory.
        interval: iterations between two writes.
    """

    def __init__(self, *, count: int, on_host: bool, interval: int = 1) -> None:
        super().__init__(interval)
        self._count = count
        self._on_host = on_host
        self._sums: dict[str, Tensor] = {}
        self._seen = 0
        self._finite = torch.zeros(())
        self._squares = torch.zeros(())
        self._measured: list[tuple[Tensor, Tensor, Tensor]] = []
        # Exponential moving sums; the ratio of single estimates would be biased and noisy.
        self._sum, self._weight = np.zeros(2), 0.0

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if `log_gradient_noise_scale` is set."""
        section = run.config.logging
        if not section.log_gradient_noise_scale:
            return None
        found = cls(
            count=section.gradient_noise_scale_n_batches,
            on_host=section.gradient_noise_scale_cpu_offload,
            interval=section.log_interval,
        )
        run.engine.update.before(found._look)
        return found

    def measure(self) -> dict[str, float]:
        """Return the average of all estimates so far, none if there is no new one.

        They are `gradient_noise_scale/noise` and `gradient_noise_scale/signal`, and their ratio in samples as
        `gradient_noise_scale/simple` if both are positive.
        """
        if not self._measured:
            return {}
        measured = torch.stack([torch.stack(values) for values in self._measured]).tolist()
        self._measured.clear()
        metrics: dict[str, float] = {}
        batch = self.run.state.samples_per_iteration
        for number, small_square, large_square in measured:
            # A window with less than two finite updates has no larger batch.
            if number < 2:
                continue
            large = batch * int(number)
            found = estimate(small=batch, small_square=small_square, large=large, large_square=large_square)
            self._sum = _DECAY * self._sum + (1 - _DECAY) * found
            self._weight = _DECAY * self._weight + (1 - _DECAY)
            noise, signal = (self._sum / self._weight).tolist()
            metrics = {"gradient_noise_scale/noise": noise, "gradient_noise_scale/signal": signal}
            if noise > 0 and signal > 0:
                metrics["gradient_noise_scale/simple"] = noise / signal
        return metrics

    def _look(self, pending: PendingUpdate) -> None:
        """Add the gradients of one update, without reading anything back from the device."""
        is_finite = torch.isfinite(pending.norm)
        if not self._sums:
            self._finite = self._squares = torch.zeros_like(pending.norm)
        for name, _, gradient in pending.weights():
            device = "cpu" if self._on_host else gradient.device
            if name not in self._sums:
                # The gradient of a weight that was not trained before was zero.
                self._sums[name] = torch.zeros_like(gradient).to(device)
            self._sums[name].add_(torch.where(is_finite, gradient, 0.0).to(device))
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
