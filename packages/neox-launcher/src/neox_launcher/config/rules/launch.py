"""Rules about where and how workers start."""

import shlex
from collections.abc import Iterator

from neox_launcher.config.problems import Problem
from neox_launcher.config.schema import NeoXConfig
from neox_launcher.config.sections.launch import MPI_LAUNCHERS

_ALL = -1


def one_choice_of_slots(c: NeoXConfig) -> Iterator[Problem]:
    """Slots are named by what is in or by what is out."""
    if c.launch.include is not None and c.launch.exclude is not None:
        yield Problem("exclude", "excludes include", "leave one of them out")


def slots_are_named_or_counted(c: NeoXConfig) -> Iterator[Problem]:
    """A count of slots means the first ones; where some are left out, that can be read two ways."""
    named = next((name for name in ("include", "exclude") if getattr(c.launch, name) is not None), None)
    if named is not None and c.launch.num_gpus not in (None, _ALL):
        what = f"counts slots from 0, and {named} names them"
        yield Problem("num_gpus", what, f"leave it out, and name the slots in {named}: worker-1:0,1")


def counts_of_devices_are_positive(c: NeoXConfig) -> Iterator[Problem]:
    """-1 means all; nothing else below 1 means anything."""
    for name, count in (("num_gpus", c.launch.num_gpus), ("num_nodes", c.launch.num_nodes)):
        if count == 0:
            yield Problem(name, "leaves nothing to train on", "use -1 for all, or at least 1")


def mpi_starts_what_learns_from_mpi(c: NeoXConfig) -> Iterator[Problem]:
    """Ranks are learnt from MPI where an MPI starts the workers."""
    launch = c.launch
    if (
        launch.deepspeed_mpi
        and "launcher" in launch.model_fields_set
        and launch.launcher not in MPI_LAUNCHERS
    ):
        what = f"needs an MPI to start the workers, and launcher: {launch.launcher} is none"
        yield Problem("deepspeed_mpi", what, f"set launcher: {', '.join(MPI_LAUNCHERS)}; or leave it out")


def launcher_arguments_are_words(c: NeoXConfig) -> Iterator[Problem]:
    """Further arguments are split as a shell splits them."""
    try:
        shlex.split(c.launch.launcher_args or "")
    except ValueError as error:
        yield Problem("launcher_args", f"cannot be split into words ({error})", "close the quotes")
