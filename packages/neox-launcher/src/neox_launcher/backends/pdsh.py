"""pdsh: one command that starts all agents over ssh."""

import shlex
import shutil
from pathlib import PurePath

from neox_launcher.backends.base import (
    Backend,
    Command,
    Contact,
    host_file,
    remote_command,
)
from neox_launcher.backends.ssh import SSH_OPTIONS, missing_ssh
from neox_launcher.plan.plan import LaunchPlan

__all__ = ["PdshBackend"]

_TOKEN_FILE = "token"
_GIVEN_UP = "given-up-"
# pdsh does not forward its standard input, from which agents read the token, and does not report that one
# host has failed until all have ended. It therefore runs this script on this machine, once per host: ssh with
# a file ($0) that only the user can read as its standard input. If ssh fails, the script creates a file ($1),
# after a short delay for pdsh to forward the output of ssh. PDSH_SSH_ARGS_APPEND is used as in pdsh itself.
_SSH = (
    "set -f; failed=$1; shift; "
    'ssh $PDSH_SSH_ARGS_APPEND "$@" < "$0" || { code=$?; sleep 1; : > "$failed"; exit $code; }'
)


class PdshBackend(Backend):
    """One `pdsh` for all hosts."""

    def missing(self) -> str | None:
        """Return why pdsh or ssh is missing and what to do, or None."""
        if shutil.which("pdsh") is None:
            return (
                "launcher: pdsh requires the program pdsh, which is not on PATH; install the package pdsh "
                "(Debian, Ubuntu) or pdsh and pdsh-rcmd-exec (Fedora, RHEL), or use launcher: ssh"
            )
        return missing_ssh("pdsh")

    def commands(self, plan: LaunchPlan, contact: Contact) -> list[Command]:
        """Return one command; `%h` and `%n` are a host and its number; other percent signs are escaped."""
        hosts, names = [host.name for host in plan.world.hosts], host_file(contact)
        token, given_up = (str(PurePath(contact.folder) / name) for name in (_TOKEN_FILE, _GIVEN_UP))
        # -S: return the largest exit code. -f: start all hosts at the same time; by default pdsh starts 32,
        # and the next one when one of them has ended, which would never happen. -N: no host before each line.
        argv = ["pdsh", "-R", "exec", "-S", "-N", "-f", str(len(hosts))]
        # WCOLL names the file as well, but without -w, pdsh's module for Slurm or Torque takes the hosts of
        # the allocation, in another order. A comma would end the path.
        argv += [] if "," in names else ["-w", f"^{names}"]
        agent = _escaped(shlex.join(remote_command(plan, contact, "--host-number"))) + " %n"
        shell = [_escaped(word) for word in ("sh", "-c", _SSH, token)]
        ssh = [*shell, f"{_escaped(given_up)}%n", *SSH_OPTIONS, "%h", agent]
        files = {names: "".join(f"{host}\n" for host in hosts), token: f"{contact.token}\n"}
        argv += [*plan.launcher_args, *ssh]
        return [Command(argv=tuple(argv), environment={"WCOLL": names}, files=files, given_up=given_up)]


def _escaped(word: str) -> str:
    return word.replace("%", "%%")
