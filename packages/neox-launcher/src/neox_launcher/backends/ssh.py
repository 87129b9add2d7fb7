"""One ssh per host; needs nothing but ssh on this machine."""

import shlex
import shutil

from neox_launcher.backends.base import Command, Contact, node_command
from neox_launcher.plan import LaunchPlan

__all__ = ["SSH_OPTIONS", "SshBackend", "missing_ssh"]

# Never ask: a question about a password or an unknown host would wait for ever, once per host. Host keys are
# checked as the user's ssh is configured to. A host that does not answer is told after seconds, not minutes.
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


class SshBackend:
    """One `ssh` per host, all at once."""

    uses_names = True

    def missing(self) -> str | None:
        """Whether there is an ssh client."""
        return missing_ssh("ssh")

    def refuses(self, plan: LaunchPlan) -> str | None:
        """Nothing: ssh takes names, aliases of its configuration and addresses of both kinds."""
        return None

    def commands(self, plan: LaunchPlan, contact: Contact) -> list[Command]:
        """Each host's node reads the token from its standard input, which ssh passes on."""
        return [
            Command(
                argv=(
                    "ssh",
                    *plan.launcher_args,
                    *SSH_OPTIONS,
                    host.name,
                    shlex.join(node_command(plan, contact, "--node", str(node))),
                ),
                stdin=f"{contact.token}\n",
                node=node,
            )
            for node, host in enumerate(plan.world.hosts)
        ]


def missing_ssh(launcher: str) -> str | None:
    """The remedy where this machine has no ssh client.

    Args:
        launcher: the backend that needs it.
    """
    if shutil.which("ssh") is not None:
        return None
    return (
        f"launcher: {launcher} needs the program ssh, which is not on PATH; it is in the package "
        "openssh-client (Debian, Ubuntu) or openssh-clients (Fedora, RHEL)"
    )
