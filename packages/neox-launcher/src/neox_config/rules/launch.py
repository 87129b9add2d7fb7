"""Rules about hosts, devices and launch backends."""

import re
import shlex
from collections.abc import Iterator

from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig
from neox_config.schema.sections.launch import MPI_LAUNCHERS

_ALL = -1
# The address is part of the command that starts the agents, which passes through shells.
_ADDRESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]+")


def slots_are_named_or_counted(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse num_gpus together with `include` or `exclude`, because the result would be ambiguous."""
    named = next((name for name in ("include", "exclude") if getattr(c.launch, name) is not None), None)
    if named is not None and c.launch.num_gpus not in (None, _ALL):
        what = f"cannot be combined with {named}"
        yield Problem("num_gpus", what, f"remove it, and list the slots in {named}: worker-1:0,1")


def counts_of_devices_are_positive(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse 0 hosts or devices; -1 means all."""
    for name, count in (("num_gpus", c.launch.num_gpus), ("num_nodes", c.launch.num_nodes)):
        if count == 0:
            yield Problem(name, "must not be 0", "use -1 for all, or at least 1")


def mpi_starts_what_learns_from_mpi(c: NeoXConfig) -> Iterator[Problem]:
    """Require an MPI launcher for deepspeed_mpi."""
    launch = c.launch
    if (
        launch.deepspeed_mpi
        and "launcher" in launch.model_fields_set
        and launch.launcher not in MPI_LAUNCHERS
    ):
        what = f"requires an MPI launcher, but launcher is {launch.launcher}"
        yield Problem("deepspeed_mpi", what, f"set launcher to {' or '.join(MPI_LAUNCHERS)}, or remove it")


def launcher_arguments_are_words(c: NeoXConfig) -> Iterator[Problem]:
    """Require launcher_args and remote_prefix to be valid shell words."""
    for name in ("launcher_args", "remote_prefix"):
        try:
            shlex.split(getattr(c.launch, name) or "")
        except ValueError as error:
            yield Problem(name, f"cannot be split into words ({error})", "close the quotes")


def the_address_of_the_launcher_is_one(c: NeoXConfig) -> Iterator[Problem]:
    """Require launcher_address to be a host name or an IP address."""
    address = c.launch.launcher_address
    if address is not None and not _ADDRESS.fullmatch(address):
        what = f"{address[:80]!r} is neither a host name nor an address"
        yield Problem("launcher_address", what, "write a name or an address without a port: 10.0.0.1")
