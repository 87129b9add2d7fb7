"""The one file that `make gpu-check` leaves: what ran on which machine, what passed, and the figures."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

__all__ = ["Result", "describe_machine", "exit_code", "render", "table", "write_report"]

Status = Literal["passed", "failed", "not run"]
_PACKAGES = ("torch", "deepspeed", "triton", "transformers", "numpy", "neox-model", "neox-kernels")
_QUERY = "name,memory.total,driver_version,compute_cap"
# Queried in a new process, so that this one uses no device.
_ASK_TORCH = """
import json, torch
found = {"CUDA of torch": str(torch.version.cuda), "GPUs torch can use": str(torch.cuda.device_count())}
if torch.cuda.is_available():
    found["cuDNN"] = str(torch.backends.cudnn.version())
    found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Result:
    """How a section ended.

    Args:
        status: `not run` where this machine, or a rehearsal, cannot run it; that is not a failure.
        summary: one line.
        details: Markdown; tables of figures, and the output of what failed.
        seconds: how long it took.
    """

    status: Status
    summary: str
    details: str = ""
    seconds: float = 0.0


def describe_machine(root: Path) -> dict[str, str]:
    """Versions, devices, date and commit.

    Args:
        root: of the repository.
    """
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(root),
        "Python": sys.version.split()[0],
    }
    facts |= {name: _version(name) for name in _PACKAGES}
    facts |= json.loads(_output_of([sys.executable, "-c", _ASK_TORCH]) or "{}")
    lines = _output_of(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]).splitlines()
    # Name, memory, driver and compute capability.
    facts |= {f"GPU {number}": line for number, line in enumerate(lines)}
    return facts if lines else facts | {"GPUs": "none found by nvidia-smi"}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit(root: Path) -> str:
    commit = _output_of(["git", "-C", str(root), "rev-parse", "HEAD"])
    changed = _output_of(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return (commit or "unknown") + (", with changes that are not committed" if changed else "")


def _output_of(command: Sequence[str]) -> str:
    """Return a command's output; an empty string if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def exit_code(results: Mapping[str, Result]) -> int:
    """0 where something ran and nothing failed."""
    statuses = [result.status for result in results.values()]
    return 0 if "passed" in statuses and "failed" not in statuses else 1


def render(
    results: Mapping[str, Result], machine: Mapping[str, str], *, sections: Sequence[str], rehearses: bool
) -> str:
    """Return the report as Markdown.

    Args:
        results: of the sections that have ended.
        machine: see `describe_machine`.
        sections: all of them, in order.
        rehearses: it ran on the CPU.
    """
    title = "GPU check: rehearsal on the CPU" if rehearses else "GPU check"
    if len(results) < len(sections):
        verdict = f"**Unfinished**: {len(results)} of {len(sections)} sections have ended."
    else:
        verdict = "**Passed.**" if exit_code(results) == 0 else "**Failed.**"
    lines = [f"# {title}", "", verdict, ""]
    if rehearses:
        lines += [
            "No GPU was used: this says that the check itself works, and nothing about CUDA, NCCL or speed "
            "on GPUs. Each section says what stood in for the GPU.",
            "",
        ]
    rows = [
        (name, results[name].status, f"{results[name].seconds:.0f} s", results[name].summary)
        if name in results
        else (name, "not ended", "", "")
        for name in sections
    ]
    lines += [table(("section", "result", "time", "summary"), rows), "", "## Machine", ""]
    lines += [table(("", ""), list(machine.items())), ""]
    for name, result in results.items():
        lines += [f"## {name}: {result.status}", "", f"{result.summary}.", ""]
        lines += [result.details.strip(), ""] if result.details else []
    return "\n".join(lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)


def write_report(path: Path, text: str) -> None:
    """Write the report so that it appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
