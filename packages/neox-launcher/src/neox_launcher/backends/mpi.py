"""The backends that use an MPI, and to which MPI a start program belongs: several are called mpirun."""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache

from neox_launcher.backends.base import Backend, Command, Contact
from neox_launcher.plan.plan import LaunchPlan

__all__ = ["Flavour", "MpiBackend", "flavour_of"]

_PATIENCE_SECONDS = 10


class Flavour(Enum):
    """Kinds of MPI start programs."""

    OPEN_MPI = "Open MPI"
    HYDRA = "MPICH (hydra)"
    INTEL = "Intel MPI (hydra)"
    MPIRUN_RSH = "MVAPICH (mpirun_rsh)"
    UNKNOWN = "an unknown MPI"


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiBackend(Backend):
    """One start program of an MPI for all workers.

    Args:
        launcher: name of the backend.
        programs: names to search for on PATH, in this order.
        wanted: accepted kinds.
        packages: packages that contain the program.
        command: returns the command, given the program, its kind, the plan and the contact.
    """

    launcher: str
    programs: tuple[str, ...]
    wanted: tuple[Flavour, ...]
    packages: str
    command: Callable[[str, Flavour | None, LaunchPlan, Contact], Command]

    def missing(self) -> str | None:
        """Return why the program is missing or that of another MPI, and what to do; None if it is there."""
        path, flavour = self.find()
        if path is not None:
            return None
        if flavour is None:
            names = " or ".join(self.programs)
            return f"launcher: {self.launcher} requires {names} on PATH; install the package {self.packages}"
        return (
            f"launcher: {self.launcher} requires another MPI, but {self.programs[0]} here is "
            f"{flavour.value}; put the right one (package {self.packages}) first on PATH, or set the "
            "launcher for this MPI"
        )

    def commands(self, plan: LaunchPlan, contact: Contact) -> list[Command]:
        """Return one command for all workers."""
        path, flavour = self.find()
        return [self.command(path or self.programs[0], flavour, plan, contact)]

    def find(self) -> tuple[str | None, Flavour | None]:
        """Return the first program of an accepted kind, and its kind; without one the last other kind."""
        flavour = None
        for path in filter(None, map(shutil.which, self.programs)):
            flavour = flavour_of(path)
            if flavour in self.wanted:
                return path, flavour
        return None, flavour


@cache
def flavour_of(program: str) -> Flavour:
    """Return the MPI to which a start program belongs, from its `--version`."""
    try:
        done = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return Flavour.UNKNOWN
    text = done.stdout + done.stderr
    if "Open MPI" in text or "OpenRTE" in text or "PRRTE" in text:
        return Flavour.OPEN_MPI
    if "mpirun_rsh" in text or ("MVAPICH" in text.upper() and "HYDRA" not in text.upper()):
        return Flavour.MPIRUN_RSH
    if "Intel" in text and "MPI" in text:
        return Flavour.INTEL
    return Flavour.HYDRA if "HYDRA" in text.upper() else Flavour.UNKNOWN
