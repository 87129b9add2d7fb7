"""Ask a service of the cluster whether the job must end, and request that it is started again.

Source: the module `userlib.auto_resume` of NVIDIA's ADLR cluster, which Megatron-LM and GPT-NeoX import. It
is part of the cluster; any object with these methods can take its place.
"""

import importlib
import logging
from typing import Any, Protocol, cast

import torch
from torch import distributed

from neox_model.errors import ModelError
from neox_model.parallel.groups import Group
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["AutoresumeHook", "AutoresumeService", "find_service"]

logger = logging.getLogger(__name__)

_METHODS = ("init", "termination_requested", "request_resume")


class AutoresumeService(Protocol):
    """What the service of a cluster must provide."""

    def init(self) -> None:
        """Prepare the service; called once by every rank, before the first iteration."""

    def termination_requested(self) -> bool:
        """Return True if the job must end; called by every rank."""

    def request_resume(self) -> None:
        """Request that the job is started again; called by rank 0 after the checkpoint is complete."""


def find_service(name: str) -> AutoresumeService:
    """Import the service.

    Args:
        name: `MODULE:OBJECT`; the object is a class or an instance with the methods of `AutoresumeService`.

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
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if missing:
        raise ModelError(
            f"adlr-autoresume: {name} has no {' and no '.join(missing)}; define these functions, or name "
            "another object in adlr-autoresume-service"
        )
    return cast(AutoresumeService, found)


class AutoresumeHook(Hook):
    """Ends the training on all ranks if the service requests it of any, and requests another start.

    Must precede the hook that saves: the last iteration is saved, then rank 0 requests another start.

    Args:
        service: the service.
        control: CPU group of all ranks.
        interval: iterations between two questions.
    """

    def __init__(self, service: AutoresumeService, control: Group, *, interval: int) -> None:
        self._service = service
        self._control = control
        self._interval = interval
        self._is_requested = False
        service.init()

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Ask at the end of each interval. Collective over the control group."""
        if state.finished or state.iteration % self._interval:
            return
        flag = torch.tensor(int(bool(self._service.termination_requested())))
        if self._control.size > 1:
            distributed.all_reduce(flag, distributed.ReduceOp.MAX, group=self._control.process_group)
        if flag.item():
            self._is_requested = True
            state.request_stop("the autoresume service requests it", is_hurried=True)
            logger.info("stopping after iteration %d: %s", state.iteration, state.stop_reason)

    def on_end(self, state: TrainState) -> None:
        """Request another start if the service ended the training."""
        if self._is_requested and self._control.rank == 0:
            self._service.request_resume()
