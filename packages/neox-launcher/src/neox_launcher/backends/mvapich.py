"""MVAPICH: uses mpirun_rsh, or hydra in versions that only have that."""

from pathlib import PurePath

from neox_launcher.backends.base import Command, Contact, refuse_ipv6, remote_command
from neox_launcher.backends.mpi import Flavour, find_program
from neox_launcher.backends.mpich import hydra_command
from neox_launcher.plan.plan import LaunchPlan

__all__ = ["MvapichBackend"]

_PROGRAMS = ("mpirun_rsh", "mpiexec.hydra", "mpiexec", "mpirun")
_KINDS = (Flavour.MPIRUN_RSH, Flavour.HYDRA)
_HOST_FILE = "machines"
_TOKEN_FILE = "token"


class MvapichBackend:
    """One `mpirun_rsh` or `mpiexec` for all workers."""

    uses_names = True

    def missing(self) -> str | None:
        """Return why its start programs are missing and what to do, or None."""
        found = find_program(_PROGRAMS, *_KINDS)
        return None if found.path else found.reason("mvapich", "mvapich2 or mvapich from the MVAPICH project")

    def refuses(self, plan: LaunchPlan) -> str | None:
        """Refuse IPv6 addresses, whose colons a host file cannot hold, and what mpirun_rsh would split."""
        found = find_program(_PROGRAMS, *_KINDS)
        if found.flavour is Flavour.MPIRUN_RSH and (plan.remote_setup or plan.remote_prefix):
            return (
                "launcher: mvapich cannot pass remote-setup and remote-prefix on, because mpirun_rsh splits "
                "them into words; use launcher: ssh or pdsh, or leave them out"
            )
        return refuse_ipv6(plan)

    def commands(self, plan: LaunchPlan, contact: Contact) -> list[Command]:
        """Return one command for all workers, using the available start program."""
        found = find_program(_PROGRAMS, *_KINDS)
        if found.path is not None and found.flavour is not Flavour.MPIRUN_RSH:
            return [hydra_command(found.path, plan, contact)]
        return [_mpirun_rsh(found.path or _PROGRAMS[0], plan, contact)]


def _mpirun_rsh(program: str, plan: LaunchPlan, contact: Contact) -> Command:
    """Return the mpirun_rsh command; the token is in a file, because variables are on the command line."""
    hosts, token = (str(PurePath(contact.folder) / name) for name in (_HOST_FILE, _TOKEN_FILE))
    argv = [program, "-ssh", "-np", str(plan.world.size), "-hostfile", hosts, *plan.launcher_args]
    # Otherwise the MVAPICH library binds processes to cores when a worker loads it.
    argv += ["MV2_ENABLE_AFFINITY=0", *remote_command(plan, contact, "--mpi", "--token-file", token)]
    lines = "".join(f"{host.name}:{len(host.slots)}\n" for host in plan.world.hosts)
    return Command(argv=tuple(argv), files={hosts: lines, token: f"{contact.token}\n"})
