"""Hydra, the start program of MPICH, Intel MPI and newer MVAPICH: one process per worker."""

from pathlib import PurePath

from neox_launcher.backends.base import TOKEN_VARIABLE, Command, Contact, node_command, refuse_ipv6
from neox_launcher.backends.mpi import Flavour, find_program
from neox_launcher.plan import LaunchPlan

__all__ = ["MpichBackend", "hydra_command"]

_PROGRAMS = ("mpiexec.hydra", "mpiexec", "mpirun", "mpiexec.mpich", "mpirun.mpich")
_MACHINE_FILE = "machines"
# Intel MPI ties each process to a core of its choice otherwise; --bind-cores is what does it here.
_NO_PINNING = {"I_MPI_PIN": "0"}


class MpichBackend:
    """One `mpiexec.hydra` with a machine file."""

    uses_names = True

    def missing(self) -> str | None:
        """Whether there is a hydra."""
        found = find_program(_PROGRAMS, Flavour.HYDRA, Flavour.INTEL)
        return None if found.path else found.reason("mpich", "mpich, or is part of Intel MPI")

    def refuses(self, plan: LaunchPlan) -> str | None:
        """A machine file takes what follows a colon for a number of processes."""
        return refuse_ipv6(plan)

    def commands(self, plan: LaunchPlan, contact: Contact) -> list[Command]:
        """One command for all workers."""
        program = find_program(_PROGRAMS, Flavour.HYDRA, Flavour.INTEL).path or _PROGRAMS[0]
        return [hydra_command(program, plan, contact)]


def hydra_command(program: str, plan: LaunchPlan, contact: Contact) -> Command:
    """Hydra gives ranks host by host in the order of the machine file, each host its number of them.

    Args:
        program: the hydra.
        plan: hosts and slots.
        contact: what the workers connect to.
    """
    machines = str(PurePath(contact.folder) / _MACHINE_FILE)
    environment = {TOKEN_VARIABLE: contact.token, **_NO_PINNING}
    argv = [program, "-machinefile", machines, "-n", str(plan.world.size)]
    argv += ["-genvlist", ",".join(environment), *plan.launcher_args, *node_command(plan, contact, "--mpi")]
    lines = "".join(f"{host.name}:{len(host.slots)}\n" for host in plan.world.hosts)
    return Command(argv=tuple(argv), environment=environment, files={machines: lines})
