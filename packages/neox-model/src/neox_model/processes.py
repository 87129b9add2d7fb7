"""Common setup of all worker programs: process groups and tokenizer."""

import logging
import os
from concurrent.futures import wait
from datetime import timedelta

import torch
from torch import distributed

from neox_config.derive.tokenizer import tokenizer_files
from neox_config.schema.sections.engine import EngineSection
from neox_config.schema.sections.tokenizer import TokenizerSection
from neox_config.spec.run import Layout
from neox_data.tokenizers import Tokenizer, build_tokenizer
from neox_launcher.worker.ranks import TORCHRUN_STORE_VARIABLE, read_rank
from neox_launcher.worker.reporting import answer_questions
from neox_model.bounds import untested_versions
from neox_model.daemon_threads import in_daemon_thread
from neox_model.parallel.flight_recorder import last_collectives
from neox_model.parallel.groups import Groups
from neox_model.parallel.topology import create_groups
from neox_model.torch_compat import expand_segments, init_process_group

__all__ = [
    "LEAVE_SECONDS",
    "RANK_VARIABLES",
    "configure_allocator",
    "join_alone",
    "join_process_group",
    "join_processes",
    "leave_processes",
    "load_tokenizer",
]

logger = logging.getLogger(__name__)

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Variables of the environment that `join_alone` sets."""

LEAVE_SECONDS = 60.0
"""Limit of `leave_processes`."""

# Variables of the environment from which PyTorch reads the settings of its allocator.
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def join_processes(layout: Layout, engine: EngineSection) -> Groups:
    """Join the process group and create this rank's groups. Collective over all ranks."""
    configure_allocator(engine)
    me = read_rank()
    has_gpus = torch.cuda.is_available()
    backend = layout.backend or ("nccl" if has_gpus else "gloo")
    _log_backend(backend, layout, has_gpus=has_gpus)
    untested = untested_versions()
    if untested and (me is None or me.rank == 0):
        logger.warning("versions that were not tested: %s; neox-launch doctor checks them", untested)
    if has_gpus:
        torch.cuda.set_device(me.local_rank if me else 0)
    if me is not None:
        answer_questions(me.rank, last_collectives)
    join_process_group(backend)
    return create_groups(layout.tensor, layout.stages, layout.experts)


def configure_allocator(engine: EngineSection) -> None:
    """Configure PyTorch's allocator of GPU memory for this process; settings in the environment win."""
    if not engine.expandable_segments:
        return
    given = next((name for name in _ALLOCATOR_VARIABLES if name in os.environ), None)
    if given is None:
        expand_segments()
    elif "expandable_segments:True" not in os.environ[given]:
        logger.info("expandable-segments has no effect: the environment has %s=%s", given, os.environ[given])


def _log_backend(backend: str, layout: Layout, *, has_gpus: bool) -> None:
    if layout.world == 1 and layout.backend is None:
        # A process alone exchanges nothing.
        device = "the GPU" if has_gpus else "the CPU (no GPU found)"
        logger.info("computing on %s, torch %s", device, torch.__version__)
        return
    reason = "configured" if layout.backend else f"{'GPUs' if has_gpus else 'no GPU'} found"
    logger.info("torch.distributed runs over %s (%s), torch %s", backend, reason, torch.__version__)


def join_process_group(backend: str, *, timeout: timedelta | None = None) -> None:
    """Join the default process group, over the socket that rank 0's agent opened, if there is one.

    With that socket, `init_process_group` by itself fails on rank 0, because MASTER_PORT is already in use.
    A process without a rank in its environment forms a group of one process.

    Args:
        backend: backend of torch.distributed.
        timeout: timeout of joining and of collectives; None for the defaults of torch.
    """
    me = read_rank()
    if me is None:
        join_alone(backend, timeout=timeout)
    elif TORCHRUN_STORE_VARIABLE in os.environ:
        init_process_group(backend, timeout=timeout)
    else:
        store = distributed.TCPStore(  # type: ignore[attr-defined]
            me.master_addr,
            me.master_port,
            me.world_size,
            is_master=me.rank == 0,
            timeout=timeout or distributed.default_pg_timeout,
            master_listen_fd=me.store_socket,
        )
        init_process_group(backend, store=store, rank=me.rank, world_size=me.world_size, timeout=timeout)


def join_alone(backend: str, *, timeout: timedelta | None = None) -> None:
    """Form a process group of this process, which changes `RANK_VARIABLES` in its environment."""
    # DeepSpeed reads these for any world size.
    os.environ.update(dict.fromkeys(RANK_VARIABLES, "0"), WORLD_SIZE="1")
    store = distributed.HashStore()  # type: ignore[attr-defined]
    init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def leave_processes() -> None:
    """Destroy the process group; the last call of a worker that succeeded, before `exit_worker`.

    An operation that another process does not answer would block it: after a limit it is left behind.
    """
    left = in_daemon_thread(distributed.destroy_process_group)
    wait([left], LEAVE_SECONDS)
    if left.done():
        left.result()
    else:
        logger.warning(
            "the process group did not end within %g s, because another process has not answered; "
            "this process has done its part and ends; if the others do not, see their logs",
            LEAVE_SECONDS,
        )


def load_tokenizer(section: TokenizerSection) -> Tokenizer:
    """Load the configured tokenizer.

    Raises:
        TokenizerError: its files are missing or unreadable.
    """
    return build_tokenizer(section.tokenizer_type, **tokenizer_files(section))
