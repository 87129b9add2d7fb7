"""Hydra, the start program of MPICH, Intel MPI and newer MVAPICH: one process per worker."""

from pathlib import PurePath

from neox_launcher.backends.base import TOKEN_VARIABLE, Command, Contact, remote_command
from neox_launcher.backends.mpi import Flavour, MpiBackend
from neox_launcher.plan.plan import LaunchPlan

__all__ = ["MPICH", "hydra_command"]

_MACHINE_FILE = "machines"
# Without this, Intel MPI binds each process to cores; use --bind-cores for that.
_NO_PINNING = {"I_MPI_PIN": "0"}


def hydra_command(program: str, flavour: Flavour | None, plan: LaunchPlan, contact: Contact) -> Command:
    """Return the hydra command; it assigns ranks host by host in the order of the machine file.

    Args:
        program: path of hydra.
        flavour: its kind.
        plan: hosts and slots.
        contact: address of the launcher.
    """
    machines = str(PurePath(contact.folder) / _MACHINE_FILE)
    environment = {TOKEN_VARIABLE: contact.token, **_NO_PINNING}
    argv = [program, "-machinefile", machines, "-n", str(plan.world.size)]
    argv += ["-genvlist", ",".join(environment), *plan.launcher_args, *remote_command(plan, contact, "--mpi")]
    lines = "".join(f"{host.name}:{len(host.slots)}\n" for host in plan.world.hosts)
    return Command(argv=tuple(argv), environment=environment, files={machines: lines})


MPICH = MpiBackend(
    launcher="mpich",
    programs=("mpiexec.hydra", "mpiexec", "mpirun", "mpiexec.mpich", "mpirun.mpich"),
    wanted=(Flavour.HYDRA, Flavour.INTEL),
    packages="mpich, or is part of Intel MPI",
    command=hydra_command,
)
