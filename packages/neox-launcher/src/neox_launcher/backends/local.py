"""The node of this machine, started as a child process."""

import importlib.util

from neox_launcher.backends.base import TOKEN_VARIABLE, Command, Contact, node_command
from neox_launcher.plan import LaunchPlan

__all__ = ["LocalBackend"]


class LocalBackend:
    """One host, this one."""

    uses_names = False

    def missing(self) -> str | None:
        """What is not installed here."""
        for package, name in (("torch", "torch"), ("neox_model", "neox-model")):
            if importlib.util.find_spec(package) is None:
                return (
                    f"{name} is not installed here; install neox-model with the three packages that it needs"
                )
        return None

    def refuses(self, plan: LaunchPlan) -> str | None:
        """Nothing: the plan has chosen it for this machine."""
        return None

    def commands(self, plan: LaunchPlan, contact: Contact) -> list[Command]:
        """The node, which finds the token in its environment: standard input stays free for prompts."""
        argv = node_command(plan, contact, "--node", "0")
        return [Command(argv=tuple(argv), environment={TOKEN_VARIABLE: contact.token}, node=0)]
