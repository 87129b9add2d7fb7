"""pdsh: one command that starts all nodes over ssh."""

import shutil
from pathlib import PurePath

from neox_launcher.backends.base import (
    Command,
    Contact,
    for_a_shell,
    node_command,
    refuse_ipv6,
)
from neox_launcher.backends.ssh import SSH_OPTIONS, missing_ssh
from neox_launcher.plan import LaunchPlan

__all__ = ["PdshBackend"]

_TOKEN_FILE = "token"
# pdsh hands nothing of its own standard input on, where nodes expect the token. So pdsh runs this on this
# machine, once per host: ssh, with a file that the user alone can read ($0) as its input.
_SSH = 'exec ssh "$@" < "$0"'


class PdshBackend:
    """One `pdsh` for all hosts."""

    uses_names = True

    def missing(self) -> str | None:
        """Whether there are pdsh and ssh."""
        if shutil.which("pdsh") is None:
            return (
                "launcher: pdsh needs the program pdsh, which is not on PATH; it is in the package pdsh "
                "(Debian, Ubuntu), or pdsh and pdsh-rcmd-exec (Fedora, RHEL); launcher: ssh works without it"
            )
        return missing_ssh("pdsh")

    def refuses(self, plan: LaunchPlan) -> str | None:
        """Pdsh takes what stands before a colon for the name of a remote shell."""
        return refuse_ipv6(plan)

    def commands(self, plan: LaunchPlan, contact: Contact) -> list[Command]:
        """`%h` and `%n` are a host and its number in the list; percent signs of our own are doubled."""
        hosts = [host.name for host in plan.world.hosts]
        token = str(PurePath(contact.folder) / _TOKEN_FILE)
        # -S: end with the largest exit code of all. -f: start all hosts at once; left alone, pdsh starts 32,
        # and the next when one of them has ended, which would be never. -N: no host before each line.
        argv = ["pdsh", "-R", "exec", "-S", "-N", "-f", str(len(hosts)), "-w", ",".join(hosts)]
        node = _escaped(for_a_shell(node_command(plan, contact, "--node"))) + " %n"
        ssh = [*(_escaped(word) for word in ("sh", "-c", _SSH, token, *SSH_OPTIONS)), "%h", node]
        return [Command(argv=(*argv, *plan.launcher_args, *ssh), files={token: f"{contact.token}\n"})]


def _escaped(word: str) -> str:
    return word.replace("%", "%%")
