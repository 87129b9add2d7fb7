"""Starts the agent of this machine as a child process; a scheduler may have started those of other hosts."""

import importlib.util

from neox_launcher.backends.base import TOKEN_VARIABLE, Backend, Command, Contact, agent_command
from neox_launcher.plan.plan import LaunchPlan

__all__ = ["LocalBackend"]


class LocalBackend(Backend):
    """Starts one agent on this machine."""

    uses_names = False

    def missing(self) -> str | None:
        """Return which required package is not installed here, or None."""
        for package, name in (("torch", "torch"), ("neox_model", "neox-model")):
            if importlib.util.find_spec(package) is None:
                return (
                    f"{name} is not installed here; in the repository, run pip install "
                    "./packages/neox-{launcher,data,kernels,model}, or install the wheels of all four"
                )
        return None

    def refuses(self, plan: LaunchPlan) -> str | None:
        """Return None: plans for this machine can always be started."""
        return None

    def commands(self, plan: LaunchPlan, contact: Contact) -> list[Command]:
        """Return the command of the agent; the token is in its environment, since stdin is for prompts."""
        number = plan.this_host
        if number is None:
            return []
        argv = agent_command(plan, contact, "--host-number", str(number))
        return [Command(argv=tuple(argv), environment={TOKEN_VARIABLE: contact.token}, host_number=number)]
