"""Measure the planning of a launch: 1,000 hosts in this process, and `neox-launch --dry-run` in a new one.

The peer of the second is a process that only imports pydantic, PyYAML and click. Times are CPU times, which
depend little on other load.

    python benchmarks/launch_plan.py
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from neox_config import load_config
from neox_launcher.backends import BACKENDS, Contact
from neox_launcher.plan.planning import Request, plan_launch

ROOT = Path(__file__).parents[1]
RUNS = 7
HOSTS = 1_000
PEER = "import pydantic, yaml, click; pydantic.BaseModel"
DRY_RUN = (
    "from neox_launcher.cli.launch import main; "
    "main(['--config', 'configs/20B.yml', '--dry-run', *{options}])"
)


def planning_seconds(hostfile: Path) -> tuple[float, float]:
    """Measure reading the configuration, and the whole plan with its commands."""
    paths = (str(ROOT / "configs" / "20B.yml"),)
    request = Request(program="train", paths=paths, overrides=(f"hostfile={hostfile}", "launcher=ssh"))
    started = time.process_time()
    load_config(paths)
    loaded = time.process_time()
    plan = plan_launch(request, environment={})
    contact = Contact(addresses=("10.0.0.1",), port=1, token="", folder="/")
    commands = BACKENDS["ssh"].commands(plan, contact)
    plan.orders()
    if len(commands) != HOSTS:
        raise SystemExit(f"{len(commands)} commands for {HOSTS} hosts")
    return loaded - started, time.process_time() - loaded


def cold_seconds(code: str) -> float:
    """Return the user and system time of a new interpreter that runs the code, with cached bytecode."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    silence = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env=environment, **silence)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def show(name: str, seconds: float, ratio: float, peer: str, goal: float | None) -> None:
    """Print one line of the table."""
    limit = f"  goal < {goal} s" if goal else ""
    print(f"{name:<36} {seconds:.3f} s  {ratio:.1f} x {peer}{limit}")


def main() -> None:
    """Print medians of several runs."""
    with tempfile.TemporaryDirectory() as folder:
        hostfile = Path(folder) / "hosts"
        hostfile.write_text("".join(f"worker-{number} slots=8\n" for number in range(HOSTS)))
        planning_seconds(hostfile)
        loads, plans = zip(*(planning_seconds(hostfile) for _ in range(RUNS)), strict=True)
        median = statistics.median(plans)
        show(f"plan of {HOSTS:,} hosts", median, median / statistics.median(loads), "reading the file", 0.3)
        many = f"['--set', 'hostfile={hostfile}', '--set', 'launcher=ssh']"
        cases = [
            ("peer: pydantic, PyYAML, click", PEER),
            ("neox-launch --dry-run, one host", DRY_RUN.format(options="['--set', 'num-gpus=8']")),
            ("neox-launch --dry-run, 1,000 hosts", DRY_RUN.format(options=many)),
        ]
        peer = None
        for name, code in cases:
            cold_seconds(code)
            median = statistics.median(cold_seconds(code) for _ in range(RUNS))
            peer = peer or median
            show(name, median, median / peer, "peer", None if code == PEER else 0.5)


if __name__ == "__main__":
    main()
