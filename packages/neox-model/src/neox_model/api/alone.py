"""Train in a process that is not a worker, and leave it as it was."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import distributed

from neox_config.errors import NeoXError
from neox_config.schema.sections.engine import EngineSection
from neox_config.spec.run import Layout
from neox_launcher.worker.ranks import read_rank, refuse_mpi_by_hand
from neox_model.assembly.engines import functions_of_engines
from neox_model.checkpoint import rng_state
from neox_model.parallel.groups import Groups
from neox_model.parallel.topology import create_groups
from neox_model.processes import RANK_VARIABLES, configure_allocator, join_alone

__all__ = ["OwnState", "groups_of_one", "plain_state"]


@contextmanager
def plain_state() -> Iterator[None]:
    """Set torch's defaults to those of a new process within the block: float32, on the CPU."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    is_plain = device == torch.device("cpu")
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        if not is_plain:
            stack.callback(torch.set_default_device, device)
            torch.set_default_device(None)
        yield


class OwnState:
    """The random generators and torch's defaults of a run, apart from those of its program."""

    def __init__(self) -> None:
        self._other = (rng_state.capture(), torch.float32, torch.device("cpu"), 0)

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Exchange the states of the run and the program within the block.

        Enter it for the run's code, and within that once more for the program's.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        now = (
            rng_state.capture(),
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_deterministic_debug_mode(),
        )
        states, dtype, device, determinism = self._other
        torch.set_deterministic_debug_mode(determinism)
        torch.set_default_dtype(dtype)
        if device != now[2]:
            torch.set_default_device(None if device == torch.device("cpu") else device)
        rng_state.restore(states)
        self._other = now


@dataclass
class _Joined:
    """The process group that `groups_of_one` has formed.

    Args:
        count: blocks that use it.
        environment: variables before it was formed; None: the program had formed it.
    """

    count: int = 0
    environment: dict[str, str | None] | None = None


_JOINED = _Joined()


@contextmanager
def groups_of_one(layout: Layout, engine: EngineSection) -> Iterator[Groups]:
    """Provide the process groups of this process alone within the block.

    Blocks may overlap; after the last one nothing is left. A group of one process that the program has formed
    itself is used, and stays.

    Raises:
        NeoXError: this process is one of several.
    """
    refuse_mpi_by_hand()
    me, is_joined = read_rank(), distributed.is_initialized()
    if (me is not None and me.world_size > 1) or (is_joined and distributed.get_world_size() > 1):
        raise NeoXError(
            "this process is one of several, but a Trainer uses one process; train with neox-launch instead"
        )
    configure_allocator(engine)
    if _JOINED.count == 0 and not is_joined:
        _JOINED.environment = {name: os.environ.get(name) for name in RANK_VARIABLES}
        join_alone(layout.backend or ("nccl" if torch.cuda.is_available() else "gloo"))
    _JOINED.count += 1
    try:
        yield create_groups(layout.tensor, layout.stages, layout.experts)
    finally:
        _JOINED.count -= 1
        if _JOINED.count == 0 and _JOINED.environment is not None:
            distributed.destroy_process_group()
            for forget in functions_of_engines("forget_process_group"):
                forget()
            for name, value in _JOINED.environment.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            _JOINED.environment = None
