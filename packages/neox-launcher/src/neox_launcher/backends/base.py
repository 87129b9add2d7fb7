"""The contract of a way to start the nodes of a launch, and what several of them need."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from neox_launcher.control import TOKEN_VARIABLE
from neox_launcher.plan import LaunchPlan

__all__ = [
    "TOKEN_VARIABLE",
    "Backend",
    "Command",
    "Contact",
    "node_command",
    "refuse_ipv6",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """How nodes reach the launcher and prove that they belong to it.

    Args:
        addresses: of this machine, the likeliest first.
        port: where the launcher listens.
        token: the secret of this launch; stands on no command line.
        folder: a folder of this launch that only the user can read, for files that a command reads.
    """

    addresses: tuple[str, ...]
    port: int | str
    token: str = field(repr=False)
    folder: str

    def __str__(self) -> str:
        return f"{','.join(self.addresses)}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command on this machine that starts one node or more, and ends after them.

    Args:
        argv: the program and its arguments; no shell reads them here.
        environment: variables that it gets above this process's own.
        stdin: what is written to its standard input, which is then closed.
        files: path to content: files to write, readable by the user alone, before it starts.
        node: the one node that it starts; None for all of them.
        given_up: a path to which a node's number is put: that file appears when the command has failed to
            start the node, while it goes on with others. None where it cannot tell one from the other.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    stdin: str = field(default="", repr=False)
    files: Mapping[str, str] = field(default_factory=dict, repr=False)
    node: int | None = None
    given_up: str | None = None

    def has_given_up(self, node: int) -> bool:
        """Whether the running command will not start a node any more, as far as it tells."""
        return self.given_up is not None and Path(f"{self.given_up}{node}").exists()


class Backend(Protocol):
    """Turns a plan into the commands that start its nodes.

    Attributes:
        uses_names: hosts are reached by names that this machine must be able to resolve.
    """

    uses_names: bool

    def missing(self) -> str | None:
        """Why this backend cannot work here, with the remedy; None when it can."""

    def refuses(self, plan: LaunchPlan) -> str | None:
        """Why this backend cannot start this plan, with the remedy; None when it can."""

    def commands(self, plan: LaunchPlan, contact: Contact) -> list[Command]:
        """What to run on this machine, all at once."""


def node_command(plan: LaunchPlan, contact: Contact, *who: str) -> list[str]:
    """What runs on a host: `neox_launcher.node`, which asks the launcher for everything else.

    Args:
        plan: knows the interpreter.
        contact: where the launcher listens.
        who: which node it is, as in `--node 3`; `--mpi` where it learns that from MPI.
    """
    # -P: a folder that happens to be called neox_launcher, where ssh begins, is not taken for it.
    return [plan.python, "-P", "-m", "neox_launcher.node", "--launcher", str(contact), *who]


def refuse_ipv6(plan: LaunchPlan) -> str | None:
    """For tools that take the colons of an address for something else: why they cannot reach it, or None."""
    found = next((host.name for host in plan.world.hosts if ":" in host.name), None)
    if found is None:
        return None
    return (
        f"launcher: {plan.launcher} cannot reach a host by its IPv6 address {found}; write the host's name, "
        "or use launcher: ssh"
    )
