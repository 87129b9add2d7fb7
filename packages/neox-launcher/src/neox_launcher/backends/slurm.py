"""Slurm's srun, inside an allocation: one task per host, no ssh."""

import os
import shutil

from neox_launcher.backends.base import (
    TOKEN_VARIABLE,
    Backend,
    Command,
    Contact,
    host_file,
    remote_command,
)
from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.resources.slurm import is_inside_allocation

__all__ = ["SlurmBackend"]


class SlurmBackend(Backend):
    """One `srun` for all hosts."""

    uses_names = False

    def missing(self) -> str | None:
        """Return why srun or an allocation is missing and what to do, or None."""
        if shutil.which("srun") is None:
            return (
                "launcher: slurm requires the program srun, which is not on PATH; install the package "
                "slurm-client"
            )
        if not is_inside_allocation(os.environ):
            return "launcher: slurm requires a Slurm allocation; start neox-launch inside sbatch or salloc"
        return None

    def commands(self, plan: LaunchPlan, contact: Contact) -> list[Command]:
        """Return one command; agents report the host name set by Slurm, which orders hosts independently."""
        hosts, names = [host.name for host in plan.world.hosts], host_file(contact)
        argv = [
            "srun",
            # A value with a slash is a file.
            f"--nodelist={names}",
            f"--nodes={len(hosts)}",
            f"--ntasks={len(hosts)}",
            "--ntasks-per-node=1",
            # The single task divides the resources of its host among the workers. --overlap: do not wait for
            # an earlier step, which keeps its hosts for minutes until Slurm has detected a lost one.
            "--cpu-bind=none",
            "--mem=0",
            "--overlap",
            # --export: the token is in the environment. --kill-on-bad-exit, --wait: the launcher ends the
            # other tasks after a failure, so that they can save; the defaults of a site may differ.
            "--export=ALL",
            "--kill-on-bad-exit=0",
            "--wait=0",
            *plan.launcher_args,
            *remote_command(plan, contact, "--slurm"),
        ]
        files = {names: "".join(f"{host}\n" for host in hosts)}
        return [Command(argv=tuple(argv), environment={TOKEN_VARIABLE: contact.token}, files=files)]
