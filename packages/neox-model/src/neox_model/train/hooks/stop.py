"""Ends the training early, on a signal or every `exit_interval` iterations: on all ranks at the same one.

A signal reaches each process at its own moment, so every iteration the ranks sum up who has seen one. The
sum of one iteration is read in the next: nobody waits for it, and all ranks read the same.
"""

import logging
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import distributed

from neox_model.parallel.groups import Group
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["StopHook"]

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A scheduler that ends a job signals every process of it, and so does the launcher: one request, told twice.
_SAME_REQUEST_SECONDS = 3.0


class StopHook(Hook):
    """Asks the state to stop.

    The first SIGTERM or SIGINT asks for a stop. Handling is then back to what it was, so that a second one
    ends the process at once; but a SIGTERM soon after the first signal tells of the same request.

    Args:
        control: a group of all ranks that communicates from host memory.
        exit_interval: stop when the iteration is a multiple of it; None: never.
    """

    def __init__(self, control: Group, *, exit_interval: int | None) -> None:
        self._control = control
        self._exit_interval = exit_interval
        self._signalled_at: float | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._answer: Callable[[], bool] | None = None

    def on_start(self, state: TrainState) -> None:
        """Listen to signals."""
        self._previous = {number: signal.signal(number, self._receive) for number in _SIGNALS}

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Read the answer to the last iteration's question, and ask the next one."""
        is_signalled = self._answer is not None and self._answer()
        if state.finished:
            self._answer = None
            return
        if is_signalled:
            state.request_stop("a signal asked for it", is_hurried=True)
        elif self._exit_interval and state.iteration % self._exit_interval == 0:
            state.request_stop(f"exit_interval is {self._exit_interval}")
        if state.stop_reason is not None:
            logger.info("stopping after iteration %d: %s", state.iteration, state.stop_reason)
        self._answer = None if state.finished else self._ask()

    def on_end(self, state: TrainState) -> None:
        """Hand signals back."""
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
        elif number != signal.SIGTERM or now - self._signalled_at > _SAME_REQUEST_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _ask(self) -> Callable[[], bool]:
        """Start summing up the ranks that were signalled; the result waits for the sum."""
        flag = torch.tensor([int(self._signalled_at is not None)])
        if self._control.size == 1:
            return lambda: bool(flag)
        work = distributed.all_reduce(flag, group=self._control.process_group, async_op=True)

        def answer() -> bool:
            work.wait()
            return bool(flag)

        return answer
