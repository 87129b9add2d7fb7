"""Starts one ssh per host; requires only ssh on this machine."""

import shlex
import shutil

from neox_launcher.backends.base import Backend, Command, Contact, remote_command
from neox_launcher.plan.plan import LaunchPlan

__all__ = ["SSH_OPTIONS", "SshBackend", "missing_ssh"]

# BatchMode: a prompt for a password or an unknown host key would wait forever on every host. Host keys are
# checked according to the user's ssh configuration. ConnectTimeout: report unreachable hosts within seconds.
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


class SshBackend(Backend):
    """One `ssh` per host, all at the same time."""

    def missing(self) -> str | None:
        """Return why ssh is missing and what to do, or None."""
        return missing_ssh("ssh")

    def refuses(self, plan: LaunchPlan) -> str | None:
        """Return None: ssh accepts names, aliases of its configuration, and IPv4 and IPv6 addresses."""
        return None

    def commands(self, plan: LaunchPlan, contact: Contact) -> list[Command]:
        """Return one command per host; agents read the token from standard input, which ssh forwards."""
        return [
            Command(
                argv=(
                    "ssh",
                    *plan.launcher_args,
                    *SSH_OPTIONS,
                    host.name,
                    shlex.join(remote_command(plan, contact, "--host-number", str(number))),
                ),
                stdin=f"{contact.token}\n",
                host_number=number,
            )
            for number, host in enumerate(plan.world.hosts)
        ]


def missing_ssh(launcher: str) -> str | None:
    """Return what to do if this machine has no ssh client, or None if it has one.

    Args:
        launcher: name of the backend that requires it.
    """
    if shutil.which("ssh") is not None:
        return None
    return (
        f"launcher: {launcher} requires the program ssh, which is not on PATH; install the package "
        "openssh-client (Debian, Ubuntu) or openssh-clients (Fedora, RHEL)"
    )
