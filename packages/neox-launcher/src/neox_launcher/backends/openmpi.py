"""Open MPI's mpirun: one process per worker."""

from neox_launcher.backends.base import (
    TOKEN_VARIABLE,
    Command,
    Contact,
    host_file,
    refuse_ipv6,
    remote_command,
)
from neox_launcher.backends.mpi import Flavour, find_program
from neox_launcher.plan.plan import LaunchPlan

__all__ = ["OpenMpiBackend"]

_PROGRAMS = ("mpirun", "mpirun.openmpi", "orterun", "prterun")
_PACKAGES = "openmpi-bin (Debian, Ubuntu) or openmpi (RHEL)"


class OpenMpiBackend:
    """One `mpirun` with a host file."""

    uses_names = True

    def missing(self) -> str | None:
        """Return why Open MPI's mpirun is missing and what to do, or None."""
        found = find_program(_PROGRAMS, Flavour.OPEN_MPI)
        return None if found.path else found.reason("openmpi", _PACKAGES)

    def refuses(self, plan: LaunchPlan) -> str | None:
        """Refuse IPv6 addresses: for mpirun, a colon precedes the number of slots."""
        return refuse_ipv6(plan)

    def commands(self, plan: LaunchPlan, contact: Contact) -> list[Command]:
        """Return one command; each line of the file is the host of one rank."""
        program = find_program(_PROGRAMS, Flavour.OPEN_MPI).path or _PROGRAMS[0]
        names = host_file(contact)
        # --oversubscribe: the plan determines the number of workers per host, independent of the slots of an
        # allocation. --bind-to none: --bind-cores binds workers to cores.
        argv = [program, "--oversubscribe", *plan.launcher_args]
        argv += ["-n", str(plan.world.size), "--hostfile", names, "--map-by", _mapping(plan)]
        argv += ["--bind-to", "none", "-x", TOKEN_VARIABLE, *remote_command(plan, contact, "--mpi")]
        files = {names: "".join(f"{host.name}\n" * len(host.slots) for host in plan.world.hosts)}
        return [Command(argv=tuple(argv), environment={TOKEN_VARIABLE: contact.token}, files=files)]


def _mapping(plan: LaunchPlan) -> str:
    # seq: the ranks are on the hosts of the lines, in their order. On one host the order does not matter, and
    # Open MPI 4 does not find the line `localhost` with seq: it has the machine's hostname in its place.
    return "slot" if len(plan.world.hosts) == 1 else "seq"
