"""The contract of a way to start workers."""

from typing import Protocol

from neox_launcher.plan import LaunchPlan

__all__ = ["Backend"]


class Backend(Protocol):
    """Turns a plan into the command that starts its workers."""

    def missing(self) -> str | None:
        """Why this backend cannot work here, with the remedy; None when it can."""

    def command(self, plan: LaunchPlan) -> list[str]:
        """The command to run on this host; it ends when the last worker has ended."""
