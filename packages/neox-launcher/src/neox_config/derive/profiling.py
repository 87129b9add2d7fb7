"""Which iterations are profiled, and the folders of what is recorded about them."""

from pathlib import Path

from neox_config.schema.sections.logging import LoggingSection

__all__ = ["memory_folder", "profiled_iterations", "trace_folder"]


def profiled_iterations(section: LoggingSection, last: int | None) -> range:
    """Return the iterations from `profile_step_start` to `profile_step_stop`; the first iteration is 1.

    With memory_profiling alone, only the stop is meant, and a later start is lowered: to the stop, or to the
    last iteration of the run.

    Args:
        section: the settings.
        last: last iteration of the run; None: not known.
    """
    stop = max(1, section.profile_step_stop)
    start = max(1, section.profile_step_start)
    if not section.profile:
        start = max(1, min(start, stop, last or stop))
    return range(start, stop + 1)


def trace_folder(section: LoggingSection) -> Path | None:
    """Return the folder of the traces: `profile` in `log_dir`, or else in `tensorboard_dir`."""
    parent = section.log_dir or section.tensorboard_dir
    return None if parent is None else Path(parent, "profile")


def memory_folder(section: LoggingSection) -> Path | None:
    """Return the folder of the memory snapshots."""
    given = section.memory_profiling_path
    return trace_folder(section) if given is None else Path(given)
