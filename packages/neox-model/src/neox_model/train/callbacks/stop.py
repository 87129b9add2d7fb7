"""End the run early, on all ranks alike: on a signal, at `exit_interval`, or at a service's request.

A signal reaches each process at a different time, so all ranks exchange the received signals every iteration.
The result is read in the next iteration, so that no rank waits for it.

The service is the module `userlib.auto_resume` of NVIDIA's ADLR cluster, which Megatron-LM and GPT-NeoX
import. It is part of the cluster; any object with these functions can take its place:

- `init()`: called once by every rank, before the first iteration;
- `termination_requested()`: returns True if the job must end; called by every rank;
- `request_resume()`: requests another start; called by rank 0 after the checkpoint is complete.
"""

import importlib
import logging
import signal
import threading
import time
from types import FrameType
from typing import Any, Self

import torch
from torch.distributed import ReduceOp

from neox_launcher.protocol.stop_signals import WARNING_SIGNAL, name_of, unblock_warning
from neox_launcher.worker.reporting import requested_signal
from neox_model.errors import ModelError
from neox_model.parallel.collectives import all_reduce
from neox_model.parallel.delayed_exchange import DelayedExchange
from neox_model.parallel.groups import Group
from neox_model.train.run import Callback, Run
from neox_model.train.state import StepReport, TrainState

__all__ = ["AutoresumeCallback", "StopCallback", "find_service"]

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, WARNING_SIGNAL)
# A scheduler that ends a job signals every process, and so does the launcher: the same request twice.
_SAME_REQUEST_SECONDS = 3.0


class StopCallback(Callback):
    """Requests a stop of the run.

    The first SIGTERM, SIGINT or SIGUSR1 requests a stop. A second SIGTERM or SIGINT is handled by the
    previous handler, which ends the process; a SIGTERM soon after the first counts as the same request.
    SIGUSR1, a scheduler's warning, never ends the process. A SIGUSR1 sent while the run loads is pending
    until `on_start`, and ends the run before its first iteration.

    The previous handlers are restored after the last callback's `on_end`, by `on_pause`: an evaluation at
    the end is ended by a signal as others are, and an upload is not.

    Args:
        control: CPU group of all ranks.
        exit_interval: stop when the iteration is a multiple of it; None: never.
        save: folder of the checkpoints, for the log; None: no checkpoints are saved.
    """

    def __init__(
        self,
        control: Group,
        *,
        exit_interval: int | None,
        save: str | None = None,
    ) -> None:
        self._signals = DelayedExchange(control, "max")
        self._exit_interval = exit_interval
        self._save = save
        self._agreed = 0
        self._received: int | None = None
        self._ends_since: float | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._mask: set[Any] = set()

    @classmethod
    def from_run(cls, run: Run) -> Self:
        """Build it."""
        training, save = run.config.training, run.config.checkpoint.save
        return cls(run.groups.control, exit_interval=training.exit_interval, save=save)

    def on_start(self) -> None:
        """Install the signal handlers; end the run if a signal is pending."""
        self.on_resume()
        state = self.run.state
        if state.finished:
            return
        self._send()
        number = self._signals.receive()
        if number:
            state.request_stop(f"{name_of(number)} received", is_hurried=True)
            logger.info(
                "stopping before iteration %d: %s; nothing new to save",
                state.iteration + 1,
                state.stop_reason,
            )

    def on_step(self, report: StepReport) -> None:
        """Read the result of the last iteration's exchange, and start the next one."""
        state = self.run.state
        number = self._signals.receive()
        if state.finished:
            return
        if number:
            state.request_stop(f"{name_of(number)} received", is_hurried=True)
        elif self._exit_interval and state.iteration % self._exit_interval == 0:
            state.request_stop(f"exit_interval is {self._exit_interval}")
        if state.stop_reason is not None:
            logger.info(
                "stopping after iteration %d: %s; %s",
                state.iteration,
                state.stop_reason,
                "no checkpoint is saved, because `save` is not set"
                if self._save is None
                else f"saving a checkpoint in {self._save}",
            )
        if not state.finished:
            self._send()

    def on_pause(self) -> None:
        """Restore the previous signal handlers."""
        self._restore()

    def on_resume(self) -> None:
        """Install the signal handlers."""
        # Python handles signals in its main thread alone; a program may train in another one.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._receive) for number in _SIGNALS}
            self._mask = unblock_warning()

    def is_stopping(self) -> bool:
        """Return whether a rank had received a signal at the last call, or before. Collective."""
        if not self._agreed:
            self._agreed = self._signals.receive() or 0
            if not self._agreed:
                self._send()
        return self._agreed != 0

    def end_evaluation(self, state: TrainState) -> None:
        """Request the stop for which an evaluation has ended. Collective."""
        while not self.is_stopping():
            pass  # The rank that has received it sends it with the next call.
        state.request_stop(f"{name_of(self._agreed)} received", is_hurried=True)
        logger.info(
            "stopping in the evaluation after iteration %d: %s; a resumed run begins with it",
            state.iteration,
            state.stop_reason,
        )

    @property
    def is_requested(self) -> bool:
        """Return whether this rank has received a signal."""
        return self._received is not None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number
        if number == WARNING_SIGNAL:
            return
        now = time.monotonic()
        if self._ends_since is None:
            self._ends_since = now
        elif number != signal.SIGTERM or now - self._ends_since > _SAME_REQUEST_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        if self._previous:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _send(self) -> None:
        """Start exchanging received signals: the result is the highest number, 0 if no rank received one."""
        self._signals.send(0 if self._received is None else int(requested_signal(self._received)))


def find_service(name: str) -> Any:
    """Import the service.

    Args:
        name: `MODULE:OBJECT`; the object is a class or an instance with the functions above.

    Raises:
        ModelError: it cannot be imported, or lacks a method.
    """
    module, _, attribute = name.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"adlr-autoresume: {name} cannot be imported ({error}); add the folder of {module} to "
            "PYTHONPATH, or name another object in adlr-autoresume-service"
        ) from error
    missing = [
        method
        for method in ("init", "termination_requested", "request_resume")
        if not callable(getattr(found, method, None))
    ]
    if missing:
        raise ModelError(
            f"adlr-autoresume: {name} has no {' and no '.join(missing)}; define these functions, or name "
            "another object in adlr-autoresume-service"
        )
    return found


class AutoresumeCallback(Callback):
    """Ends the run on all ranks if the service requests it of any, and requests another start.

    Must precede the callback that saves: the last iteration is saved, then rank 0 requests another start.

    Args:
        service: the service.
        control: CPU group of all ranks.
        interval: iterations between two questions.
    """

    def __init__(self, service: Any, control: Group, *, interval: int) -> None:
        self._service = service
        self._control = control
        self._interval = interval
        self._is_requested = False
        service.init()

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if `adlr_autoresume` is set."""
        section = run.config.training
        if not section.adlr_autoresume:
            return None
        service = find_service(section.adlr_autoresume_service)
        return cls(service, run.groups.control, interval=section.adlr_autoresume_interval)

    def on_step(self, report: StepReport) -> None:
        """Ask at the end of each interval. Collective over the control group."""
        state = self.run.state
        if state.finished or state.iteration % self._interval:
            return
        flag = torch.tensor(int(bool(self._service.termination_requested())))
        if all_reduce(flag, self._control, ReduceOp.MAX).item():
            self._is_requested = True
            state.request_stop("the autoresume service requests it", is_hurried=True)
            logger.info("stopping after iteration %d: %s", state.iteration, state.stop_reason)

    def on_end(self) -> None:
        """Request another start if the service ended the run."""
        if self._is_requested and self._control.rank == 0:
            self._service.request_resume()
