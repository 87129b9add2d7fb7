"""Examine this host, and check the contracts of the installed torch and DeepSpeed on it.

The check is a process that uses no GPU. `host.py` is imported by name: where torch lacks a name that our
modules require, its import fails, and the check finds which.
"""

import importlib
import subprocess
import sys
from typing import Any

from neox_config import Resolved
from neox_launcher.worker.ranks import read_rank
from neox_launcher.worker.reporting import report_facts
from neox_model.errors import ModelError

__all__ = ["examine"]

_CONTRACTS = "neox_model.contracts"
_CONTRACT_SECONDS = 120.0
# What an interface that has changed raises.
_CHANGED = (AttributeError, ImportError, TypeError)


def examine(resolved: Resolved) -> None:
    """Report the facts of this host; its first worker adds the check. Collective over all ranks.

    Args:
        resolved: the configuration, with paths and backend.

    Raises:
        ModelError: a changed interface of torch or DeepSpeed prevents the examination.
    """
    me, config = read_rank(), resolved.config
    rank, local_rank = (me.rank, me.local_rank) if me else (0, 0)
    try:
        facts = importlib.import_module("neox_model.doctor.host").examine(
            resolved.model,
            resolved.run,
            config.training,
            data=config.data,
            written=config.checkpoint,
            log_dir=config.logging.log_dir,
            rank=rank,
            local_rank=local_rank,
        )
    except _CHANGED as error:
        contracts = check_contracts()
        if contracts["hold"]:
            raise
        raise ModelError(contracts["found"]) from error
    if local_rank == 0:
        report_facts(rank, {**facts, "contracts": check_contracts()})


def check_contracts() -> dict[str, Any]:
    """Run `python -m neox_model.contracts`; return whether all contracts hold, and what it prints."""
    command = [sys.executable, "-m", _CONTRACTS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CONTRACT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"hold": False, "found": f"{_CONTRACTS} did not end within {_CONTRACT_SECONDS:.0f} s"}
    last = done.stderr.strip().rpartition("\n")[-1]
    found = done.stdout.strip() or f"{_CONTRACTS} ended with exit code {done.returncode}: {last}"
    return {"hold": done.returncode == 0, "found": found}
