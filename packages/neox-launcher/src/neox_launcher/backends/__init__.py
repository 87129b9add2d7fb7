"""Backends that start the agents: one file per launcher, selected by name."""

from collections.abc import Mapping

from neox_launcher.backends.base import Backend, Command, Contact, too_large
from neox_launcher.backends.local import LocalBackend
from neox_launcher.backends.mpich import MpichBackend
from neox_launcher.backends.mvapich import MvapichBackend
from neox_launcher.backends.openmpi import OpenMpiBackend
from neox_launcher.backends.pdsh import PdshBackend
from neox_launcher.backends.slurm import SlurmBackend
from neox_launcher.backends.ssh import SshBackend

__all__ = ["BACKENDS", "Backend", "Command", "Contact", "too_large"]

BACKENDS: Mapping[str, Backend] = {
    "local": LocalBackend(),
    "pdsh": PdshBackend(),
    "ssh": SshBackend(),
    "openmpi": OpenMpiBackend(),
    "mvapich": MvapichBackend(),
    "mpich": MpichBackend(),
    "slurm": SlurmBackend(),
}
