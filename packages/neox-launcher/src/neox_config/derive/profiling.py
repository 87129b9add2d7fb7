"""Which iterations are profiled, and the folders of what is recorded about them."""

from pathlib import Path

from neox_config.schema.config import NeoXConfig

__all__ = ["memory_folder", "profiled_iterations", "trace_folder"]


def profiled_iterations(config: NeoXConfig) -> range:
    """Return the iterations from `profile_step_start` to `profile_step_stop`; the first iteration is 1.

    With memory_profiling alone, only the stop is meant, and a later start is lowered: to the stop, or to the
    last iteration of the training.
    """
    section, stop = config.logging, max(1, config.logging.profile_step_stop)
    start = max(1, section.profile_step_start)
    if not section.profile:
        start = max(1, min(start, stop, config.training.train_iters or stop))
    return range(start, stop + 1)


def trace_folder(config: NeoXConfig) -> Path | None:
    """Return the folder of the traces: `profile` in `log_dir`, or else in `tensorboard_dir`."""
    parent = config.logging.log_dir or config.logging.tensorboard_dir
    return None if parent is None else Path(parent, "profile")


def memory_folder(config: NeoXConfig) -> Path | None:
    """Return the folder of the memory snapshots."""
    given = config.logging.memory_profiling_path
    return trace_folder(config) if given is None else Path(given)
