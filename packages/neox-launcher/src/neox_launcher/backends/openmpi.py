"""Open MPI's mpirun: one process per worker."""

from neox_launcher.backends.base import TOKEN_VARIABLE, Command, Contact, host_file, remote_command
from neox_launcher.backends.mpi import Flavour, MpiBackend
from neox_launcher.plan.plan import LaunchPlan

__all__ = ["OPEN_MPI"]


def _command(program: str, flavour: Flavour | None, plan: LaunchPlan, contact: Contact) -> Command:
    """Return the command; each line of the file is the host of one rank."""
    names, hosts = host_file(contact), plan.world.hosts
    # seq: the ranks are on the hosts of the lines, in their order. On one host the order does not matter, and
    # Open MPI 4 does not find the line `localhost` with seq: it has the machine's hostname in its place.
    mapping = "slot" if len(hosts) == 1 else "seq"
    # --oversubscribe: the plan determines the number of workers per host, independent of the slots of an
    # allocation. --bind-to none: --bind-cores binds workers to cores.
    argv = [program, "--oversubscribe", *plan.launcher_args]
    argv += ["-n", str(plan.world.size), "--hostfile", names, "--map-by", mapping]
    argv += ["--bind-to", "none", "-x", TOKEN_VARIABLE, *remote_command(plan, contact, "--mpi")]
    files = {names: "".join(f"{host.name}\n" * len(host.slots) for host in hosts)}
    return Command(argv=tuple(argv), environment={TOKEN_VARIABLE: contact.token}, files=files)


OPEN_MPI = MpiBackend(
    launcher="openmpi",
    programs=("mpirun", "mpirun.openmpi", "orterun", "prterun"),
    wanted=(Flavour.OPEN_MPI,),
    packages="openmpi-bin (Debian, Ubuntu) or openmpi (RHEL)",
    command=_command,
)
