"""Run a program that is ended with its parent: `python tied_process.py PARENT PROGRAM ARGUMENTS`.

The program receives SIGTERM even if its parent is killed; ninja then ends the compilers that it has started.
Executed as a file, so that the package, which imports torch, is not imported.
"""

import ctypes
import os
import signal
import sys

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent (Linux only), and become the program."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            # The parent ended before the call to prctl.
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
