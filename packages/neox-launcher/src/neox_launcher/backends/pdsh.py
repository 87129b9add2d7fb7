"""pdsh: one command that starts all nodes over ssh."""

import shlex
import shutil
from pathlib import PurePath

from neox_launcher.backends.base import (
    Command,
    Contact,
    node_command,
    refuse_ipv6,
)
from neox_launcher.backends.ssh import SSH_OPTIONS, missing_ssh
from neox_launcher.plan import LaunchPlan

__all__ = ["PdshBackend"]

_TOKEN_FILE = "token"
_GIVEN_UP = "given-up-"
# pdsh hands nothing of its own standard input on, where nodes expect the token, and does not tell that one
# host has failed until all have ended. So it runs this on this machine, once per host: ssh, with a file that
# the user alone can read ($0) as its input. Where that fails, a file ($1) says so, a moment later, when pdsh
# has passed on what ssh said. PDSH_SSH_ARGS_APPEND counts as it does for pdsh's own ssh.
_SSH = (
    "set -f; failed=$1; shift; "
    'ssh $PDSH_SSH_ARGS_APPEND "$@" < "$0" || { code=$?; sleep 1; : > "$failed"; exit $code; }'
)


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
        token, given_up = (str(PurePath(contact.folder) / name) for name in (_TOKEN_FILE, _GIVEN_UP))
        # -S: end with the largest exit code of all. -f: start all hosts at once; left alone, pdsh starts 32,
        # and the next when one of them has ended, which would be never. -N: no host before each line.
        argv = ["pdsh", "-R", "exec", "-S", "-N", "-f", str(len(hosts)), "-w", ",".join(hosts)]
        node = _escaped(shlex.join(node_command(plan, contact, "--node"))) + " %n"
        shell = [_escaped(word) for word in ("sh", "-c", _SSH, token)]
        ssh = [*shell, f"{_escaped(given_up)}%n", *SSH_OPTIONS, "%h", node]
        files = {token: f"{contact.token}\n"}
        return [Command(argv=(*argv, *plan.launcher_args, *ssh), files=files, given_up=given_up)]


def _escaped(word: str) -> str:
    return word.replace("%", "%%")
