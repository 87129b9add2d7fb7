"""Build the hooks that measure what a training does: traces, memory, communication."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import torch

from neox_config.derive.profiling import memory_folder, profiled_iterations, trace_folder
from neox_config.schema.sections.engine import CommsLogger
from neox_config.schema.sections.logging import LoggingSection
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
def recorded_memory(
    section: LoggingSection, groups: Groups, progress: Progress, *, last_iteration: int | None
) -> Iterator[MemoryHook | None]:
    """Record allocations on this process's GPU within the block, from before the model is built."""
    folder = memory_folder(section)
    if not section.memory_profiling or folder is None or not torch.cuda.is_available():
        yield None
        return
    last = profiled_iterations(section, last_iteration)[-1]
    hook = MemoryHook(last, folder, rank=groups.world.rank, while_writing=progress.repeated)
    with closing(hook):
        hook.start()
        yield hook


@contextmanager
def profilers(
    section: LoggingSection,
    comms: CommsLogger,
    engine: Engine,
    groups: Groups,
    progress: Progress,
    memory: MemoryHook | None,
    *,
    last_iteration: int | None,
) -> Iterator[list[Hook]]:
    """Provide the configured hooks; after the block, also after an error, nothing is measured any more.

    They must follow all others, so that they measure what those do, too.

    Args:
        section: what is profiled, and where it is recorded.
        comms: what is logged of communication.
        engine: of the training.
        groups: of this process.
        progress: reports that traces are being written.
        memory: records allocations already; None: it is not requested.
        last_iteration: of the training.
    """
    rank, on_gpu = groups.world.rank, engine.device.type == "cuda"
    iterations = profiled_iterations(section, last_iteration)
    # There are no snapshots of a host's memory.
    traces_memory = section.memory_profiling and not on_gpu
    with ExitStack() as stack:
        hooks: list[ProfileHook | MemoryHook | CollectivesHook] = []
        if section.profile or traces_memory:
            folders = [
                trace_folder(section) if section.profile else None,
                memory_folder(section) if traces_memory else None,
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
        if comms.enabled:
            interval = section.log_interval if comms.verbose else None
            hooks.append(_collectives(comms, engine, groups, interval))
        for hook in hooks:
            stack.callback(hook.close)
        yield [*hooks]


def _collectives(
    section: CommsLogger, engine: Engine, groups: Groups, interval: int | None
) -> CollectivesHook:
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
    return CollectivesHook(times, interval=interval, rank=groups.world.rank)
