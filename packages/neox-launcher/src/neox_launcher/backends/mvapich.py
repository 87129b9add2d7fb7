"""MVAPICH: uses mpirun_rsh, or hydra in versions that only have that."""

from pathlib import PurePath

from neox_launcher.backends.base import Command, Contact, remote_command
from neox_launcher.backends.mpi import Flavour, MpiBackend
from neox_launcher.backends.mpich import hydra_command
from neox_launcher.plan.plan import LaunchPlan

__all__ = ["MVAPICH"]

_HOST_FILE = "machines"
_TOKEN_FILE = "token"


class _Mvapich(MpiBackend):
    def refuses(self, plan: LaunchPlan) -> str | None:
        """Refuse IPv6 addresses, whose colons a host file cannot hold, and what mpirun_rsh would split."""
        _, flavour = self.find()
        if flavour is Flavour.MPIRUN_RSH and (plan.remote_setup or plan.remote_prefix):
            return (
                "launcher: mvapich cannot pass remote-setup and remote-prefix on, because mpirun_rsh splits "
                "them into words; use launcher: ssh or pdsh, or leave them out"
            )
        return super().refuses(plan)


def _command(program: str, flavour: Flavour | None, plan: LaunchPlan, contact: Contact) -> Command:
    """Return the command; for mpirun_rsh the token is in a file, as variables are on the command line."""
    if flavour is Flavour.HYDRA:
        return hydra_command(program, flavour, plan, contact)
    hosts, token = (str(PurePath(contact.folder) / name) for name in (_HOST_FILE, _TOKEN_FILE))
    argv = [program, "-ssh", "-np", str(plan.world.size), "-hostfile", hosts, *plan.launcher_args]
    # Otherwise the MVAPICH library binds processes to cores when a worker loads it.
    argv += ["MV2_ENABLE_AFFINITY=0", *remote_command(plan, contact, "--mpi", "--token-file", token)]
    lines = "".join(f"{host.name}:{len(host.slots)}\n" for host in plan.world.hosts)
    return Command(argv=tuple(argv), files={hosts: lines, token: f"{contact.token}\n"})


MVAPICH = _Mvapich(
    launcher="mvapich",
    programs=("mpirun_rsh", "mpiexec.hydra", "mpiexec", "mpirun"),
    wanted=(Flavour.MPIRUN_RSH, Flavour.HYDRA),
    packages="mvapich2 or mvapich from the MVAPICH project",
    command=_command,
)
