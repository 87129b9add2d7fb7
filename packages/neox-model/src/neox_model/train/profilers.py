"""Build the hooks that measure what a training does: traces, memory, communication."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from neox_config import NeoXConfig
from neox_config.derive.profiling import memory_folder, profiled_iterations, trace_folder
from neox_model.engine.contract import Engine
from neox_model.metrics.collective_times import CollectiveTimes
from neox_model.parallel.groups import Groups
from neox_model.train.hooks.base import Hook
from neox_model.train.hooks.collectives import CollectivesHook
from neox_model.train.hooks.memory import MemoryHook
from neox_model.train.hooks.profile import ProfileHook

__all__ = ["profilers"]


@contextmanager
def profilers(config: NeoXConfig, engine: Engine, groups: Groups) -> Iterator[list[Hook]]:
    """Provide the configured hooks; after the block, also after an error, nothing is measured any more.

    They must follow all others, so that they measure what those do, too.
    """
    rank, section, on_gpu = groups.world.rank, config.logging, engine.device.type == "cuda"
    iterations = profiled_iterations(config)
    # There are no snapshots of a host's memory.
    traces_memory = section.memory_profiling and not on_gpu
    with ExitStack() as stack:
        hooks: list[ProfileHook | MemoryHook | CollectivesHook] = []
        if section.profile or traces_memory:
            folders = [trace_folder(config)] * section.profile + [memory_folder(config)] * traces_memory
            hooks.append(
                ProfileHook(
                    iterations,
                    list(dict.fromkeys(folder for folder in folders if folder is not None)),
                    rank=rank,
                    device=engine.device,
                    is_of_memory=traces_memory,
                )
            )
        memory = memory_folder(config)
        if section.memory_profiling and on_gpu and memory is not None:
            hooks.append(MemoryHook(iterations[-1], memory, rank=rank))
        if config.engine.comms_logger.enabled:
            hooks.append(_collectives(config, engine, groups))
        for hook in hooks:
            stack.callback(hook.close)
        yield [*hooks]


def _collectives(config: NeoXConfig, engine: Engine, groups: Groups) -> CollectivesHook:
    section = config.engine.comms_logger
    named = {"pipe": groups.pipe, "model": groups.model, "data": groups.data}
    on_gpu = engine.device.type == "cuda"
    times = CollectiveTimes(
        {groups.world.ranks: "world"}
        | {group.ranks: name for name, group in named.items() if group.size > 1},
        operations=None if section.prof_all else frozenset(section.prof_ops),
        synchronize=torch.cuda.synchronize if on_gpu else lambda: None,
        is_verbose=section.verbose,
        names_callers=section.debug,
    )
    interval = config.logging.log_interval if section.verbose else None
    return CollectivesHook(times, interval=interval, rank=groups.world.rank)
