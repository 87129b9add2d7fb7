"""Hydra, the start program of MPICH, Intel MPI and newer MVAPICH: one process per worker."""

from pathlib import PurePath

from neox_launcher.backends.base import TOKEN_VARIABLE, Command, Contact, refuse_ipv6, remote_command
from neox_launcher.backends.mpi import Flavour, find_program
from neox_launcher.plan.plan import LaunchPlan

__all__ = ["MpichBackend", "hydra_command"]

_PROGRAMS = ("mpiexec.hydra", "mpiexec", "mpirun", "mpiexec.mpich", "mpirun.mpich")
_MACHINE_FILE = "machines"
# Without this, Intel MPI binds each process to cores; use --bind-cores for that.
_NO_PINNING = {"I_MPI_PIN": "0"}


class MpichBackend:
    """One `mpiexec.hydra` with a machine file."""

    uses_names = True

    def missing(self) -> str | None:
        """Return why hydra is missing and what to do, or None."""
        found = find_program(_PROGRAMS, Flavour.HYDRA, Flavour.INTEL)
        return None if found.path else found.reason("mpich", "mpich, or is part of Intel MPI")

    def refuses(self, plan: LaunchPlan) -> str | None:
        """Refuse IPv6 addresses: in a machine file, a colon precedes the number of processes."""
        return refuse_ipv6(plan)

    def commands(self, plan: LaunchPlan, contact: Contact) -> list[Command]:
        """Return one command for all workers."""
        program = find_program(_PROGRAMS, Flavour.HYDRA, Flavour.INTEL).path or _PROGRAMS[0]
        return [hydra_command(program, plan, contact)]


def hydra_command(program: str, plan: LaunchPlan, contact: Contact) -> Command:
    """Return the hydra command; it assigns ranks host by host in the order of the machine file.

    Args:
        program: path of hydra.
        plan: hosts and slots.
        contact: address of the launcher.
    """
    machines = str(PurePath(contact.folder) / _MACHINE_FILE)
    environment = {TOKEN_VARIABLE: contact.token, **_NO_PINNING}
    argv = [program, "-machinefile", machines, "-n", str(plan.world.size)]
    argv += ["-genvlist", ",".join(environment), *plan.launcher_args, *remote_command(plan, contact, "--mpi")]
    lines = "".join(f"{host.name}:{len(host.slots)}\n" for host in plan.world.hosts)
    return Command(argv=tuple(argv), environment=environment, files={machines: lines})
