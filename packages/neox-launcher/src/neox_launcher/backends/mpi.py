"""Which MPI a program belongs to, as its `--version` says: several are called mpirun."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache

__all__ = ["Flavour", "Found", "find_program", "flavour_of"]

_PATIENCE_SECONDS = 10


class Flavour(Enum):
    """Kinds of MPI start programs, by what their version says."""

    OPEN_MPI = "Open MPI"
    HYDRA = "MPICH (hydra)"
    INTEL = "Intel MPI (hydra)"
    MPIRUN_RSH = "MVAPICH (mpirun_rsh)"
    UNKNOWN = "an unknown MPI"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A start program, or what was found instead of it.

    Args:
        path: None where there is none of the wanted kinds.
        flavour: of that program; else of the last one that was looked at, None where there is none at all.
        names: what was looked for.
    """

    path: str | None
    flavour: Flavour | None
    names: tuple[str, ...]

    def reason(self, launcher: str, packages: str) -> str:
        """Why the launcher cannot work, with the remedy.

        Args:
            launcher: the backend.
            packages: where the program is found.
        """
        if self.flavour is None:
            names = " or ".join(self.names)
            return f"launcher: {launcher} needs {names}, and none is on PATH; see the package {packages}"
        return (
            f"launcher: {launcher} needs another MPI: {self.names[0]} here is {self.flavour.value}; put the "
            f"right one (package {packages}) first on PATH, or set the launcher that fits"
        )


def find_program(names: Sequence[str], *wanted: Flavour) -> Found:
    """The first program of these names that belongs to one of the wanted MPIs.

    Args:
        names: to look for on PATH, in this order.
        wanted: kinds that do.
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
    """The MPI that a start program belongs to."""
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
