"""The loop of the thread that computes, on every rank of the model's copy.

Rank 0 sends the commands of its web server to the other ranks before every step, so that all make the same
calls of the engine in the same order. An idle rank 0 waits for commands, and sends an empty list every
`HEARTBEAT_SECONDS`, because a collective operation that waits longer than the timeout of the process group
(30 minutes) ends the other ranks. Waiting ranks use no processor time.
"""

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch.distributed

from neox_config.pluralize import pluralize
from neox_launcher.protocol.stop_signals import WARNING_SIGNAL, handling, unblock_warning
from neox_model.generate.engine import Engine
from neox_model.generate.interruption import stop_for
from neox_model.parallel.groups import Group
from neox_model.serve.calls import Calls, Command
from neox_model.serve.errors import ApiError

__all__ = ["HEARTBEAT_SECONDS", "StopSignals", "run_calls"]

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 30.0
# How often rank 0 looks for a signal while it is idle; a signal handler must not take locks.
_POLL_SECONDS = 0.2
STOPPING = "the server is stopping; send the request to another one"


class StopSignals:
    """SIGTERM, Ctrl-C and SIGUSR1: requests to stop. A second SIGTERM or Ctrl-C ends the process.

    Args:
        decides: False on ranks that stop with rank 0: they note the signal alone.
    """

    def __init__(self, *, decides: bool) -> None:
        self.decides = decides
        self.received: int | None = None

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals in the block."""
        with handling(self._receive, signal.SIGTERM, signal.SIGINT, WARNING_SIGNAL):
            unblock_warning()
            yield

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and self.decides and number != WARNING_SIGNAL:
            raise stop_for(self.received)
        self.received = self.received or number


def run_calls(
    engine: Engine,
    control: Group,
    signals: StopSignals,
    calls: Calls | None,
    *,
    stop_seconds: float = 0.0,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Answer calls until a signal requests the stop and all are answered. Collective over all ranks.

    Args:
        engine: decodes the texts; a new one, whose tickets are the numbers of the texts.
        control: CPU group of all ranks.
        signals: requests to stop.
        calls: the calls of rank 0's web server; None on other ranks.
        stop_seconds: time to complete the calls after a request to stop; those that remain get an error.
        check: called often on rank 0; raises an error if the web server has ended.
    """
    source = None if calls is None else _Source(calls, signals, stop_seconds, check)
    while True:
        commands = source.next(is_busy=engine.is_busy) if source is not None else []
        commands = _shared(control, commands, signals)
        for command in commands:
            if command.action == "end":
                return
            if command.request is None:
                engine.cancel(command.text)
            else:
                ticket = engine.submit(command.request)
                assert ticket == command.text, "both are numbered in the order in which texts are submitted"
        for update in engine.step() if engine.is_busy else ():
            if calls is not None:
                calls.deliver(update.ticket, update)


class _Source:
    """The commands of rank 0, with the end behind the last call after a request to stop."""

    def __init__(
        self, calls: Calls, signals: StopSignals, stop_seconds: float, check: Callable[[], None]
    ) -> None:
        self._calls, self._signals, self._check = calls, signals, check
        self._stop_seconds = stop_seconds
        self._stop_by: float | None = None

    def next(self, *, is_busy: bool) -> list[Command]:
        """Return the commands before the next step; an idle engine waits for them up to a heartbeat."""
        wait_until = time.monotonic() + (0.0 if is_busy else HEARTBEAT_SECONDS)
        while True:
            self._check()
            self._stop()
            left = wait_until - time.monotonic()
            may_end = self._stop_by is not None and not is_busy and self._calls.count == 0
            commands = self._calls.take(timeout=0.0 if may_end else min(left, _POLL_SECONDS))
            if may_end and all(command.action == "cancel" for command in commands):
                return [*commands, Command("end", -1)]
            if commands or left <= 0:
                return commands

    def _stop(self) -> None:
        """Accept no calls after a request to stop, and end those that take too long."""
        if self._signals.received is None:
            return
        now = time.monotonic()
        if self._stop_by is None:
            self._stop_by = now + self._stop_seconds
            self._calls.refuse(ApiError(503, STOPPING))
            if self._calls.count:
                logger.info(
                    "stopping: %s completed first", pluralize(self._calls.count, "text is", "texts are")
                )
        if now > self._stop_by and (count := self._calls.fail_all(ApiError(503, STOPPING))):
            left = pluralize(count, "text was", "texts were")
            logger.warning("%s not completed within %g s (stop-timeout)", left, self._stop_seconds)


def _shared(control: Group, commands: list[Command], signals: StopSignals) -> list[Command]:
    """Return the commands of rank 0 on every rank. Collective over the control group."""
    if control.size == 1:
        return commands
    items = [commands]
    try:
        torch.distributed.broadcast_object_list(items, src=0, group=control.process_group)
    except RuntimeError as error:
        # Rank 0 may have received the same signal before it handled it.
        if signals.received is not None and not signals.decides:
            raise stop_for(signals.received) from error
        raise
    return items[0]
