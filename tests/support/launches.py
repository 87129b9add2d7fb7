"""Real launches by the command `neox-launch`, and shell commands as in documents, on this machine's CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["ENVIRONMENT", "LAUNCH", "launch", "shell", "write_job"]

LAUNCH = Path(sys.executable).with_name("neox-launch")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def write_job(folder: Path, settings: dict[str, Any]) -> Path:
    """Write `job.yml`."""
    path = folder / "job.yml"
    # JSON is YAML.
    path.write_text(json.dumps(settings))
    return path


def launch(folder: Path, *arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder until it ends.

    Args:
        folder: the working folder.
        arguments: of the command.
        seconds: the longest that it may take.
    """
    return subprocess.run(
        [LAUNCH, *arguments],
        cwd=folder,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def shell(
    folder: Path,
    command: str,
    *,
    seconds: float,
    commands: Path = Path(sys.executable).parent,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in a folder, without standard input; it finds the commands of an environment.

    Args:
        folder: the working folder.
        command: the line, as a reader of a document types it.
        seconds: the longest that it may take.
        commands: folder of the environment's commands; an environment need not be activated.
        variables: further variables of the process.
    """
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | ENVIRONMENT | {"PATH": path} | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
