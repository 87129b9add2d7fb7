"""Determines to which MPI a start program belongs, from its `--version`: several are called mpirun."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache

__all__ = ["Flavour", "Found", "find_program", "flavour_of"]

_PATIENCE_SECONDS = 10


class Flavour(Enum):
    """Kinds of MPI start programs."""

    OPEN_MPI = "Open MPI"
    HYDRA = "MPICH (hydra)"
    INTEL = "Intel MPI (hydra)"
    MPIRUN_RSH = "MVAPICH (mpirun_rsh)"
    UNKNOWN = "an unknown MPI"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Result of the search for a start program.

    Args:
        path: path of the program; None if there is none of the wanted kinds.
        flavour: kind of that program, else of the last program that was examined; None if there is none.
        names: names that were searched for.
    """

    path: str | None
    flavour: Flavour | None
    names: tuple[str, ...]

    def reason(self, launcher: str, packages: str) -> str:
        """Return why the launcher cannot work and what to do.

        Args:
            launcher: name of the backend.
            packages: packages that contain the program.
        """
        if self.flavour is None:
            names = " or ".join(self.names)
            return f"launcher: {launcher} requires {names} on PATH; install the package {packages}"
        return (
            f"launcher: {launcher} requires another MPI, but {self.names[0]} here is {self.flavour.value}; "
            f"put the right one (package {packages}) first on PATH, or set the launcher for this MPI"
        )


def find_program(names: Sequence[str], *wanted: Flavour) -> Found:
    """Find the first program that belongs to one of the wanted MPIs.

    Args:
        names: names to search for on PATH, in this order.
        wanted: accepted kinds.
    """
    seen = None
    for name in names:
        path = shutil.which(name)
        if path is None:
            continue
        flavour = flavour_of(path)
        if flavour in wanted:
            return Found(path=path, flavour=flavour, names=tuple(names))
        seen = flavour
    return Found(path=None, flavour=seen, names=tuple(names))


@cache
def flavour_of(program: str) -> Flavour:
    """Return the MPI to which a start program belongs."""
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
    return _read_version(done.stdout + done.stderr)


def _read_version(text: str) -> Flavour:
    if "Open MPI" in text or "OpenRTE" in text or "PRRTE" in text:
        return Flavour.OPEN_MPI
    if "mpirun_rsh" in text or ("MVAPICH" in text.upper() and "HYDRA" not in text.upper()):
        return Flavour.MPIRUN_RSH
    if "Intel" in text and "MPI" in text:
        return Flavour.INTEL
    return Flavour.HYDRA if "HYDRA" in text.upper() else Flavour.UNKNOWN
