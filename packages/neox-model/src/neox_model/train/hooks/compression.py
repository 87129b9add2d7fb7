"""Compress the model during training: prepare every iteration, and log the result."""

import logging
from collections.abc import Callable, Sequence

from neox_config.counted import counted
from neox_model.metrics.writers.base import MetricWriter
from neox_model.train.compression import TrainedCompression
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["CompressionHook"]

logger = logging.getLogger(__name__)


class CompressionHook(Hook):
    """Prepares the compression of the next iteration after every iteration.

    Args:
        compression: the compression, which was prepared for the first iteration.
        writers: receive `compression/bits`, `compression/sparsity` and `compression_error/NAME`; empty on all
            ranks except one.
        interval: iterations between two writes.
        before_writing: called first, so that metrics are written in order.
        is_verbose: log every change of a number of bits.
    """

    def __init__(
        self,
        compression: TrainedCompression,
        *,
        writers: Sequence[MetricWriter],
        interval: int,
        before_writing: Callable[[], None],
        is_verbose: bool,
    ) -> None:
        self._compression = compression
        self._writers, self._interval = writers, interval
        self._before_writing = before_writing
        self._is_verbose = is_verbose

    def on_start(self, state: TrainState) -> None:
        """Log the numbers of bits."""
        if self._is_verbose:
            self._log_bits({}, state.iteration)

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Prepare the next iteration; write figures at the end of each interval."""
        before = self._compression.bits()
        self._compression.after(state.iteration)
        if self._is_verbose:
            self._log_bits(before, state.iteration)
        if state.iteration % self._interval:
            return
        figures = self._compression.report()
        self._before_writing()
        for writer in self._writers:
            writer.write(figures, state.iteration)

    def _log_bits(self, before: dict[str, int | None], iteration: int) -> None:
        for name, bits in self._compression.bits().items():
            if bits is not None and bits != before.get(name):
                logger.info("iteration %d: the weights of %s have %s", iteration, name, counted(bits, "bit"))
