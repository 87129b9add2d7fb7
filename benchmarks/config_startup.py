"""Measure cold starts of the configuration: importing it, and `neox-config check configs/20B.yml`.

Each runs in a new process and is measured in CPU time, which depends little on other load. The peer is a
process that only imports pydantic, PyYAML and click: no configuration that uses them can start faster.

    python benchmarks/config_startup.py
"""

import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNS = 7
CHECK = "from neox_launcher.cli.config import main; main(['check', 'configs/20B.yml'])"
CASES = [
    ("peer: pydantic, PyYAML, click", "import pydantic, yaml, click; pydantic.BaseModel", None),
    ("import neox_config", "import neox_config", 0.25),
    ("neox-config check configs/20B.yml", CHECK, 0.5),
]


def cpu_seconds(code: str) -> float:
    """Return the user and system time of a new interpreter that runs the code, with cached bytecode."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """Print the median and the minimum of several runs, and the ratio to the peer."""
    for _, code, _ in CASES:
        cpu_seconds(code)
    peer = None
    for name, code, goal in CASES:
        seconds = [cpu_seconds(code) for _ in range(RUNS)]
        median = statistics.median(seconds)
        peer = peer or median
        limit = f"  goal < {goal} s" if goal else ""
        print(f"{name:<36} {median:.3f} s (least {min(seconds):.3f})  {median / peer:.1f} x peer{limit}")


if __name__ == "__main__":
    main()
