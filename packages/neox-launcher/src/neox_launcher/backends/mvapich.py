"""MVAPICH: through its own mpirun_rsh, or through hydra where it comes with that alone."""

from pathlib import PurePath

from neox_launcher.backends.base import Command, Contact, node_command, refuse_ipv6
from neox_launcher.backends.mpi import Flavour, find_program
from neox_launcher.backends.mpich import hydra_command
from neox_launcher.plan import LaunchPlan

__all__ = ["MvapichBackend"]

_PROGRAMS = ("mpirun_rsh", "mpiexec.hydra", "mpiexec", "mpirun")
_KINDS = (Flavour.MPIRUN_RSH, Flavour.HYDRA)
_HOST_FILE = "machines"
_TOKEN_FILE = "token"


class MvapichBackend:
    """One `mpirun_rsh` or `mpiexec` for all workers."""

    uses_names = True

    def missing(self) -> str | None:
        """Whether there is one of its start programs."""
        found = find_program(_PROGRAMS, *_KINDS)
        return None if found.path else found.reason("mvapich", "mvapich2 or mvapich of its makers")

    def refuses(self, plan: LaunchPlan) -> str | None:
        """A host file takes what follows a colon for a number of processes."""
        return refuse_ipv6(plan)

    def commands(self, plan: LaunchPlan, contact: Contact) -> list[Command]:
        """One command for all workers, of whichever start program there is."""
        found = find_program(_PROGRAMS, *_KINDS)
        if found.path is not None and found.flavour is not Flavour.MPIRUN_RSH:
            return [hydra_command(found.path, plan, contact)]
        return [_mpirun_rsh(found.path or _PROGRAMS[0], plan, contact)]


def _mpirun_rsh(program: str, plan: LaunchPlan, contact: Contact) -> Command:
    """It takes variables on its command line alone, which all users can see: the token comes in a file."""
    hosts, token = (str(PurePath(contact.folder) / name) for name in (_HOST_FILE, _TOKEN_FILE))
    argv = [program, "-ssh", "-np", str(plan.world.size), "-hostfile", hosts, *plan.launcher_args]
    # Its library would tie processes to cores when a worker loads it.
    argv += ["MV2_ENABLE_AFFINITY=0", *node_command(plan, contact, "--mpi", "--token-file", token)]
    lines = "".join(f"{host.name}:{len(host.slots)}\n" for host in plan.world.hosts)
    return Command(argv=tuple(argv), files={hosts: lines, token: f"{contact.token}\n"})
