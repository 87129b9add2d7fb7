"""The interface of the backends, and what several of them share."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import ClassVar

from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.protocol.handshake import TOKEN_VARIABLE

__all__ = [
    "TOKEN_VARIABLE",
    "Backend",
    "Command",
    "Contact",
    "agent_command",
    "host_file",
    "remote_command",
]


# A login shell, which defines `module` and similar functions. $0 are the commands of the user, which must not
# read the token from the standard input.
_SETUP = (
    'eval "$0" </dev/null || '
    '{ code=$?; echo "remote-setup failed with exit code $code: $0" >&2; exit $code; }; exec "$@"'
)

_HOST_FILE = "hosts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """How agents connect to the launcher and authenticate.

    Args:
        addresses: addresses of this machine, the most likely first.
        port: port of the launcher.
        token: secret of this launch; must not appear on a command line.
        folder: folder of this launch that only the user can read, for files that a command reads.
    """

    addresses: tuple[str, ...]
    port: int | str
    token: str = field(repr=False)
    folder: str

    def __str__(self) -> str:
        return f"{','.join(self.addresses)}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command on this machine that starts one or more agents and ends after them.

    Args:
        argv: program and arguments, run without a shell.
        environment: variables in addition to those of this process.
        stdin: text that is written to its standard input, which is then closed.
        files: path to content of files that are written before it starts, readable only by the user.
        host_number: number of the host whose agent it starts; None for all hosts.
        given_up: prefix of a path: a file with the number of a host appended appears when the command has
            failed to start the agent there and continues with others. None if it cannot report this.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    stdin: str = field(default="", repr=False)
    files: Mapping[str, str] = field(default_factory=dict, repr=False)
    host_number: int | None = None
    given_up: str | None = None

    def has_given_up(self, host_number: int) -> bool:
        """Return whether the running command has reported that it cannot start the agent of a host."""
        return self.given_up is not None and Path(f"{self.given_up}{host_number}").exists()


class Backend(ABC):
    """Turns a plan into the commands that start its agents.

    Attributes:
        uses_names: whether this machine must be able to resolve the host names.
    """

    uses_names: ClassVar[bool] = True

    @abstractmethod
    def missing(self) -> str | None:
        """Return why this backend cannot work here and what to do; None if it can."""

    def refuses(self, plan: LaunchPlan) -> str | None:
        """Return why this backend cannot start this plan and what to do; None if it can.

        Most tools cannot parse IPv6 addresses, because a colon has another meaning for them.
        """
        found = next((host.name for host in plan.world.hosts if ":" in host.name), None)
        if found is None:
            return None
        return (
            f"launcher: {plan.launcher} cannot reach a host by its IPv6 address {found}; use the host name, "
            "or launcher: ssh"
        )

    @abstractmethod
    def commands(self, plan: LaunchPlan, contact: Contact) -> list[Command]:
        """Return the commands to run on this machine, all at the same time."""


def agent_command(plan: LaunchPlan, contact: Contact, *who: str) -> list[str]:
    """Return the command that runs the agent on a host; the agent receives everything else from the launcher.

    Args:
        plan: contains the interpreter.
        contact: address of the launcher.
        who: host of the agent, as in `--host-number 3`, or `--mpi` to take the rank from MPI.
    """
    # -P: do not import a folder called neox_launcher in the directory where ssh starts the command.
    return [plan.python, "-P", "-m", "neox_launcher.agent", "--launcher", str(contact), *who]


def remote_command(plan: LaunchPlan, contact: Contact, *who: str) -> list[str]:
    """Return the command that a tool runs on a host: the agent, after `remote_setup`, under `remote_prefix`.

    Args:
        plan: contains both settings and the interpreter.
        contact: address of the launcher.
        who: host of the agent, as for `agent_command`.
    """
    command = [*plan.remote_prefix, *agent_command(plan, contact, *who)]
    if plan.remote_setup is None:
        return command
    return ["bash", "-l", "-c", _SETUP, plan.remote_setup, *command]


def host_file(contact: Contact) -> str:
    """Return the path of the file that lists the hosts; command lines cannot hold thousands of names."""
    return str(PurePath(contact.folder) / _HOST_FILE)
