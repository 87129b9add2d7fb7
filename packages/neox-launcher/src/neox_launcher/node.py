"""One per host: `torch.distributed.run` with this host's workers, quiet, and never outliving the launcher.

`python -m neox_launcher.node ARGUMENTS` is `python -m torch.distributed.run ARGUMENTS`, but it dies with its
parent, and where a worker failed it writes the exit codes to `exit_codes.json` in the folder NEOX_RUN_DIR
instead of printing a table: the launcher tells what happened.
"""

import json
import logging
import os
import runpy
import sys
from pathlib import Path

from neox_launcher.worker import (
    AGENT_FILE,
    EXIT_CODES_FILE,
    RUN_DIR_VARIABLE,
    die_with_parent,
    write_aside,
)

__all__ = ["main"]

_AGENT = "torch.distributed.run"


def main() -> None:
    """Run the agent with this process's arguments."""
    die_with_parent()
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    if run_dir:
        write_aside(Path(run_dir) / AGENT_FILE, str(os.getpid()))
    # The agent's own log repeats what the launcher says.
    logging.disable(logging.ERROR)
    try:
        runpy.run_module(_AGENT, run_name="__main__", alter_sys=True)
    except Exception as error:
        if run_dir and _write_exit_codes(Path(run_dir), error):
            sys.exit(1)
        raise


def _write_exit_codes(folder: Path, error: Exception) -> bool:
    """Leave what the agent knows of its failed workers, if that is what the error is about."""
    failures = getattr(error, "failures", None)
    if not failures:
        return False
    codes = {rank: failure.exitcode for rank, failure in failures.items()}
    write_aside(folder / EXIT_CODES_FILE, json.dumps(codes))
    return True


if __name__ == "__main__":
    main()
