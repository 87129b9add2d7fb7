"""Workers on this host, started by PyTorch's own `torch.distributed.run`."""

import importlib.util
import sys

from neox_launcher.plan import LaunchPlan

__all__ = ["LocalBackend"]


class LocalBackend:
    """One host, static rendezvous."""

    def missing(self) -> str | None:
        """What is not installed here."""
        for package, name in (("torch", "torch"), ("neox_model", "neox-model")):
            if importlib.util.find_spec(package) is None:
                return (
                    f"{name} is not installed here; install neox-model with the three packages that it needs"
                )
        return None

    def command(self, plan: LaunchPlan) -> list[str]:
        """`neox_launcher.node` around `torch.distributed.run`, so that its workers never outlive it."""
        return [
            sys.executable,
            "-m",
            "neox_launcher.node",
            "--nnodes=1",
            f"--nproc-per-node={plan.world.size}",
            f"--master-addr={plan.master_addr}",
            f"--master-port={plan.master_port}",
            *plan.worker,
        ]
