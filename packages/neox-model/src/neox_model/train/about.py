"""Describe a run in its record: what is trained, where, with which configuration and code."""

import hashlib
import os
import platform
import socket
import subprocess
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from neox_config.estimate.resolved import estimate_resolved
from neox_config.extras.compression.fields import LayerReduction
from neox_config.spec.resolve import derived_values
from neox_config.spec.resume import flat_values
from neox_config.spec.update import DataSpec
from neox_launcher.worker.reporting import RESTART_VARIABLE
from neox_model.metrics.peaks import peak_tflops
from neox_model.train.training import Training
from neox_model.versions import package_versions

__all__ = ["about_run", "code_version", "device_name"]

_OURS = ("neox_config", "neox_launcher", "neox_data", "neox_kernels", "neox_model")


def about_run(training: Training, *, weights: str | None) -> dict[str, Any]:
    """Return the content of the event `start` as plain values, without secrets.

    Args:
        training: its parts.
        weights: where the weights come from that it starts with; None: they are new, but for those of the
            base of adapters.
    """
    resolved = training.resolved
    config, layout = resolved.config, resolved.run.layout
    restart = os.environ.get(RESTART_VARIABLE)
    peak, reason = peak_tflops(device_name(), resolved.run.precision.weights)
    device = "cuda" if device_name() else "cpu"
    estimate, _ = estimate_resolved(resolved, vocab_size=training.tokenizer.vocab_size, device=device)
    memory = estimate.memory[estimate.fullest_stage]
    return {
        "restart": None if restart is None else int(restart),
        "host": socket.gethostname(),
        "devices": layout.world,
        "layout": {
            "data": layout.data,
            "model": layout.tensor,
            "pipe": layout.stages,
        },
        "device": device_name() or f"CPU ({platform.machine()}, {os.cpu_count()} cores)",
        "peak_tflops": peak,
        "peak_reason": reason,
        "packages": package_versions(),
        "attention": dict(training.attention),
        "code": code_version(),
        "config": flat_values(config),
        "origins": {name: str(place) for name, place in config.sources.items()},
        "derived": {
            name: value
            for name, value in derived_values(resolved).items()
            if name not in ("attention_types", "weight_owners")
        },
        "estimate": {
            "device": device,
            "memory_bytes": {**asdict(memory), "total": memory.total},
            "parameters": estimate.total_parameters,
            "flops_per_token": estimate.flops_per_token,
            "causal_flops_per_token": estimate.causal_flops_per_token,
            "flops_per_iteration": estimate.flops_per_iteration,
            "communication": asdict(estimate.communication),
        },
        "last_iteration": config.training.iterations,
        "checkpoint": weights,
        # Absolute, so that `neox-report` finds it from any working directory.
        "save": config.checkpoint.save and str(Path(config.checkpoint.save).absolute()),
    }


def first_weights(data: DataSpec, reduction: LayerReduction) -> str | None:
    """Return where the first weights of a model come from, besides `load` and the base of adapters."""
    if data.objective == "ict" and data.targets.bert_load:
        return data.targets.bert_load
    return reduction.teacher if reduction.enabled else None


def device_name() -> str | None:
    """Return the name of this process's GPU; None without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def code_version() -> dict[str, str | None]:
    """Return the commit of our sources, with `-dirty` if files differ, and a hash of all our Python files.

    The commit is None without a checkout or git.
    """
    state = hashlib.sha256()
    for package in _OURS:
        folder = _folder_of(package)
        for path in sorted(folder.rglob("*.py")):
            state.update(f"{package}/{path.relative_to(folder)}\n".encode())
            state.update(path.read_bytes())
    folder, commit = _folder_of("neox_model"), None
    # An installed package may lie in another project's checkout, which does not track it.
    if _git(folder, "ls-files", "__init__.py"):
        commit = _git(folder, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return {"commit": commit, "sources_sha256": state.hexdigest()[:16]}


def _folder_of(package: str) -> Path:
    found = find_spec(package)
    assert found is not None, f"{package} is imported by the training"
    assert found.origin is not None, f"{package} has an __init__.py"
    return Path(found.origin).parent


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git in a folder; None if it fails or is empty."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
