"""Backends that start the agents: one file per launcher, selected by name."""

from collections.abc import Mapping

from neox_launcher.backends.base import Backend, Command, Contact
from neox_launcher.backends.local import LocalBackend
from neox_launcher.backends.mpich import MPICH
from neox_launcher.backends.mvapich import MVAPICH
from neox_launcher.backends.openmpi import OPEN_MPI
from neox_launcher.backends.pdsh import PdshBackend
from neox_launcher.backends.slurm import SlurmBackend
from neox_launcher.backends.ssh import SshBackend

__all__ = ["BACKENDS", "Backend", "Command", "Contact"]

BACKENDS: Mapping[str, Backend] = {
    "local": LocalBackend(),
    "pdsh": PdshBackend(),
    "ssh": SshBackend(),
    "openmpi": OPEN_MPI,
    "mvapich": MVAPICH,
    "mpich": MPICH,
    "slurm": SlurmBackend(),
}
