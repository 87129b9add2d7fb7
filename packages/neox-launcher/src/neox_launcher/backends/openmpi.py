"""Open MPI's mpirun: one process per worker."""

from neox_launcher.backends.base import TOKEN_VARIABLE, Command, Contact, node_command, refuse_ipv6
from neox_launcher.backends.mpi import Flavour, find_program
from neox_launcher.plan import LaunchPlan

__all__ = ["OpenMpiBackend"]

_PROGRAMS = ("mpirun", "mpirun.openmpi", "orterun", "prterun")
_PACKAGES = "openmpi-bin (Debian, Ubuntu) or openmpi (RHEL)"


class OpenMpiBackend:
    """One `mpirun` with a part for each host."""

    uses_names = True

    def missing(self) -> str | None:
        """Whether there is an mpirun of Open MPI."""
        found = find_program(_PROGRAMS, Flavour.OPEN_MPI)
        return None if found.path else found.reason("openmpi", _PACKAGES)

    def refuses(self, plan: LaunchPlan) -> str | None:
        """Mpirun takes what follows a colon for a number of slots."""
        return refuse_ipv6(plan)

    def commands(self, plan: LaunchPlan, contact: Contact) -> list[Command]:
        """Parts joined by `:` get their ranks one after the other, so ranks are in plan order."""
        program = find_program(_PROGRAMS, Flavour.OPEN_MPI).path or _PROGRAMS[0]
        worker = node_command(plan, contact, "--mpi")
        # The plan has counted each host's workers, whatever an allocation counts as slots. --bind-cores, not
        # mpirun, ties them to cores.
        argv = [program, "--oversubscribe", *plan.launcher_args]
        for number, host in enumerate(plan.world.hosts):
            count = str(len(host.slots))
            part = ["-n", count, "--host", f"{host.name}:{count}", "--bind-to", "none", "-x", TOKEN_VARIABLE]
            argv += [*([":"] if number else []), *part, *worker]
        return [Command(argv=tuple(argv), environment={TOKEN_VARIABLE: contact.token})]
