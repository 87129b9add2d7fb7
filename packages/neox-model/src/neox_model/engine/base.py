"""What the engines share: the measurement of phases, the weights of the computation, and the saved state."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from neox_model.engine.contract import Measure
from neox_model.engine.updater import Updater
from neox_model.parallel.param_shard import ParamShard
from neox_model.parallel.partitioned import is_sharded

__all__ = ["BaseEngine", "CountingEngine"]


class BaseEngine:
    """A part of every engine.

    Args:
        model: the module inside the engine.
        update: updates its weights, an `Update` with a loss scale to save.
        is_partitioned: returns whether ZeRO partitions a parameter between two updates.
    """

    def __init__(
        self,
        model: nn.Module,
        update: Any,
        is_partitioned: Callable[[nn.Parameter], bool] = is_sharded,
    ) -> None:
        self.model = model
        self.update = update
        self._is_partitioned = is_partitioned
        self._measure: Measure = lambda phase: nullcontext()

    def measure_phases(self, measure: Measure) -> None:
        """Measure the phases of every step from now on."""
        outer = self._measure

        @contextmanager
        def measure_both(phase: str) -> Iterator[None]:
            with outer(phase), measure(phase):
                yield

        self._measure = measure_both
        self.update.measure_reduction(measure)

    def computing_weights(self) -> Iterator[ParamShard]:
        """Yield the model's weights that this rank holds whole between two updates."""
        for param in self.model.parameters():
            if not self._is_partitioned(param):
                yield ParamShard(param, 0, param.numel(), param, 0, tuple(param.shape))

    def counters(self) -> dict[str, int]:
        """Return the numbers of updates, the skipped ones included, and samples, by DeepSpeed's names."""
        raise NotImplementedError

    def restore_counters(self, state: Mapping[str, Any]) -> None:
        """Restore the numbers from `counters`."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the loss scale."""
        return self.counters() | self.update.loss_scale_state()

    def missing_counters(self, state: Mapping[str, Any]) -> set[str]:
        """Return the counters that a state lacks."""
        return self.counters().keys() - {name for name, value in state.items() if value is not None}

    def load_state_dict(self, state: Mapping[str, Any], *, loss_scale: bool) -> None:
        """Restore the counters, and the loss scale if requested."""
        self.restore_counters(state)
        # DeepSpeed's loss scale, if it does not change, was once saved without its counters.
        if loss_scale and state.get("cur_iter") is not None:
            self.update.load_loss_scale(state)


class CountingEngine(BaseEngine):
    """A part of every engine that makes our update and counts itself.

    Args:
        model: the module inside the engine.
        update: updates its weights.
        samples: samples per update, over all data-parallel ranks.
    """

    update: Updater

    def __init__(self, model: nn.Module, update: Updater, samples: int) -> None:
        super().__init__(model, update)
        self._samples = samples
        self._counts = {"global_steps": 0, "global_samples": 0}

    def advance(self) -> None:
        """Count one update."""
        self._counts["global_steps"] += 1
        self._counts["global_samples"] += self._samples

    def counters(self) -> dict[str, int]:
        """Return the counts by name."""
        return dict(self._counts)

    def restore_counters(self, state: Mapping[str, Any]) -> None:
        """Restore the counts."""
        self._counts = {name: int(state[name]) for name in self._counts}
