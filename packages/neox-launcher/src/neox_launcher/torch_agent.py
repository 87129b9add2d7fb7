"""`python -m torch.distributed.run` as a node starts it: quiet, deaf to signals, never outliving the node.

Signals are the launcher's to judge: the agent turns a SIGTERM into a SIGKILL of its workers after 30 seconds,
saved or not. It starts with them blocked, and `neox_launcher.seat` unblocks them for the worker; SIGUSR1
stays blocked until the worker handles it. Where a worker failed, the exit codes go to a file in the run
folder instead of a table on the terminal.
"""

import json
import logging
import os
import runpy
import signal
import sys
from pathlib import Path

from neox_launcher.stop_signals import STOP_SIGNALS
from neox_launcher.worker import (
    AGENT_FILE,
    EXIT_CODES_FILE,
    NODE_FILE,
    RUN_DIR_VARIABLE,
    die_with_parent,
    write_aside,
)

__all__ = ["main"]

_AGENT = "torch.distributed.run"


def main() -> None:
    """Run the agent with this process's arguments."""
    folder = Path(os.environ[RUN_DIR_VARIABLE])
    die_with_parent(int((folder / NODE_FILE).read_text()))
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    write_aside(folder / AGENT_FILE, str(os.getpid()))
    # The agent's own log repeats what the launcher says.
    logging.disable(logging.ERROR)
    try:
        runpy.run_module(_AGENT, run_name="__main__", alter_sys=True)
    except Exception as error:
        failures = getattr(error, "failures", None)
        if not failures:
            raise
        codes = {rank: failure.exitcode for rank, failure in failures.items()}
        write_aside(folder / EXIT_CODES_FILE, json.dumps(codes))
        sys.exit(1)


if __name__ == "__main__":
    main()
