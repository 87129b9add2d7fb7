"""Build the hooks that measure what a training does: traces, memory, communication."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import torch

from neox_config import NeoXConfig
from neox_config.derive.profiling import memory_folder, profiled_iterations, trace_folder
from neox_launcher.worker.reporting import Progress
from neox_model.engine.contract import Engine
from neox_model.metrics.collective_times import CollectiveTimes
from neox_model.parallel.groups import Groups
from neox_model.train.hooks.base import Hook
from neox_model.train.hooks.collectives import CollectivesHook
from neox_model.train.hooks.memory import MemoryHook
from neox_model.train.hooks.profile import ProfileHook

__all__ = ["profilers", "recorded_memory"]


@contextmanager
def recorded_memory(config: NeoXConfig, groups: Groups, progress: Progress) -> Iterator[MemoryHook | None]:
    """Record allocations on this process's GPU within the block, from before the model is built."""
    folder = memory_folder(config)
    if not config.logging.memory_profiling or folder is None or not torch.cuda.is_available():
        yield None
        return
    last = profiled_iterations(config)[-1]
    hook = MemoryHook(last, folder, rank=groups.world.rank, while_writing=progress.repeated)
    with closing(hook):
        hook.start()
        yield hook


@contextmanager
def profilers(
    config: NeoXConfig, engine: Engine, groups: Groups, progress: Progress, memory: MemoryHook | None
) -> Iterator[list[Hook]]:
    """Provide the configured hooks; after the block, also after an error, nothing is measured any more.

    They must follow all others, so that they measure what those do, too.

    Args:
        config: of the training.
        engine: of the training.
        groups: of this process.
        progress: reports that traces are being written.
        memory: records allocations already; None: it is not requested.
    """
    rank, section, on_gpu = groups.world.rank, config.logging, engine.device.type == "cuda"
    iterations = profiled_iterations(config)
    # There are no snapshots of a host's memory.
    traces_memory = section.memory_profiling and not on_gpu
    with ExitStack() as stack:
        hooks: list[ProfileHook | MemoryHook | CollectivesHook] = []
        if section.profile or traces_memory:
            folders = [
                trace_folder(config) if section.profile else None,
                memory_folder(config) if traces_memory else None,
            ]
            hooks.append(
                ProfileHook(
                    iterations,
                    list(dict.fromkeys(folder for folder in folders if folder is not None)),
                    rank=rank,
                    device=engine.device,
                    is_of_memory=traces_memory,
                    while_writing=progress.repeated,
                )
            )
        if memory is not None:
            hooks.append(memory)
        if config.engine.comms_logger.enabled:
            hooks.append(_collectives(config, engine, groups))
        for hook in hooks:
            stack.callback(hook.close)
        yield [*hooks]


def _collectives(config: NeoXConfig, engine: Engine, groups: Groups) -> CollectivesHook:
    section = config.engine.comms_logger
    # The later ones count: over gloo the control group is the world, which an axis of all ranks is, too.
    everyone = {"control": groups.control, "world": groups.world}
    axes = {"data": groups.data, "model": groups.model, "pipe": groups.pipe}
    on_gpu = engine.device.type == "cuda"
    times = CollectiveTimes(
        everyone | {name: group for name, group in axes.items() if group.size > 1},
        operations=None if section.prof_all else frozenset(section.prof_ops),
        synchronize=torch.cuda.synchronize if on_gpu else lambda: None,
        is_verbose=section.verbose,
        names_callers=section.debug,
    )
    interval = config.logging.log_interval if section.verbose else None
    return CollectivesHook(times, interval=interval, rank=groups.world.rank)
