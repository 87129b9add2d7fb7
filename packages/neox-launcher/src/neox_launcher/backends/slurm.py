"""Slurm's srun, inside an allocation: one task per host, no ssh."""

import os
import shutil

from neox_launcher.backends.base import TOKEN_VARIABLE, Command, Contact, node_command, refuse_ipv6
from neox_launcher.plan import LaunchPlan
from neox_launcher.resources.slurm import is_inside_allocation

__all__ = ["SlurmBackend"]


class SlurmBackend:
    """One `srun` for all hosts."""

    uses_names = False

    def missing(self) -> str | None:
        """Whether there are srun and an allocation."""
        if shutil.which("srun") is None:
            return (
                "launcher: slurm needs the program srun, which is not on PATH; see the package slurm-client"
            )
        if not is_inside_allocation(os.environ):
            return "launcher: slurm works inside an allocation alone; start it inside sbatch or salloc"
        return None

    def refuses(self, plan: LaunchPlan) -> str | None:
        """Slurm knows hosts by name."""
        return refuse_ipv6(plan)

    def commands(self, plan: LaunchPlan, contact: Contact) -> list[Command]:
        """Slurm numbers hosts in its own order, so each node finds itself by the name that Slurm gives it."""
        hosts = [host.name for host in plan.world.hosts]
        argv = [
            "srun",
            f"--nodelist={','.join(hosts)}",
            f"--nodes={len(hosts)}",
            f"--ntasks={len(hosts)}",
            "--ntasks-per-node=1",
            # The one task shares out all that its host has among the workers. It waits for no earlier step:
            # one that has lost a host holds the others until Slurm has noticed, minutes later.
            "--cpu-bind=none",
            "--mem=0",
            "--overlap",
            # The token travels in the environment. A failed task does not end the others before they could
            # save: when they end is the launcher's part, where a site may have set otherwise.
            "--export=ALL",
            "--kill-on-bad-exit=0",
            "--wait=0",
            *plan.launcher_args,
            *node_command(plan, contact, "--slurm"),
        ]
        return [Command(argv=tuple(argv), environment={TOKEN_VARIABLE: contact.token})]
