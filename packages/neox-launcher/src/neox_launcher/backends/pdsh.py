"""pdsh: one command that starts all nodes over ssh."""

import shutil

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


class PdshBackend:
    """One `pdsh` for all hosts."""

    def missing(self) -> str | None:
        """Whether there are pdsh and ssh."""
        if shutil.which("pdsh") is None:
            return (
                "launcher: pdsh needs the program pdsh, which is not on PATH; it is in the package pdsh "
                "(Debian, Ubuntu) or pdsh-rcmd-ssh (Fedora, RHEL); launcher: ssh does the same without it"
            )
        return missing_ssh("pdsh")

    def refuses(self, plan: LaunchPlan) -> str | None:
        """Pdsh takes what stands before a colon for the name of a remote shell."""
        return refuse_ipv6(plan)

    def commands(self, plan: LaunchPlan, contact: Contact) -> list[Command]:
        """`%n` is the number of a host in the list; a percent sign of our own is doubled."""
        who = for_a_shell(node_command(plan, contact, "--node")).replace("%", "%%") + " %n"
        hosts = [host.name for host in plan.world.hosts]
        # -S: end with the largest exit code of all. -f: start all hosts at once; left alone, pdsh starts 32,
        # and the next when one of them has ended, which would be never.
        argv = ["pdsh", "-S", "-f", str(len(hosts)), "-w", ",".join(hosts), *plan.launcher_args, who]
        environment = {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": " ".join(SSH_OPTIONS)}
        return [Command(argv=tuple(argv), environment=environment, stdin=f"{contact.token}\n")]
