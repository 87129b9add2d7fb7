"""Describe a run in its record: what is trained, where, with which configuration and code."""

import hashlib
import logging
import os
import platform
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neox_config.estimate import flops_per_token
from neox_config.estimate.parameters import active_parameters
from neox_config.estimate.resolved import estimate_resolved
from neox_config.extras.compression.fields import LayerReduction
from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_config.pluralize import pluralize
from neox_config.spec.model import Experts, ModelSpec
from neox_config.spec.resolve import derived_values
from neox_config.spec.resume import flat_values
from neox_config.spec.run import RunSpec
from neox_config.spec.update import DataSpec
from neox_launcher.worker.reporting import RESTART_VARIABLE
from neox_model.metrics.peaks import peak_tflops
from neox_model.metrics.throughput import Throughput
from neox_model.parallel.control import all_gather_object
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import named_logical_parameters
from neox_model.train.run import Run
from neox_model.versions import package_versions

__all__ = ["code_version", "describe_size", "device_name", "first_weights", "model_throughput", "run_info"]

logger = logging.getLogger(__name__)

_OURS = ("neox_config", "neox_launcher", "neox_data", "neox_kernels", "neox_model")


def run_info(run: Run, *, weights: str | None) -> dict[str, Any]:
    """Return the content of the event `start` as plain values, without secrets.

    Args:
        run: the run.
        weights: where the weights come from that it starts with; None: they are new, but for those of the
            base of adapters.
    """
    resolved = run.resolved
    config, layout = resolved.config, resolved.run.layout
    restart = os.environ.get(RESTART_VARIABLE)
    peak, reason = peak_tflops(device_name(), resolved.run.precision.weights)
    device = "cuda" if device_name() else "cpu"
    estimate, _ = estimate_resolved(resolved, vocab_size=run.tokenizer.vocab_size, device=device)
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
        "attention": dict(run.attention),
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
            "active_parameters": estimate.active_parameters,
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
    assert found is not None, f"{package} is imported by the run"
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


def describe_size(parameters: Sequence[tuple[Sequence[int], bool]]) -> str:
    """Return the number of parameters, and of those that are trained if these are not all, in words.

    Args:
        parameters: the shape of each tensor, and whether it is trained.
    """
    count = sum(prod(shape) for shape, _ in parameters)
    num_trained = sum(prod(shape) for shape, is_trained in parameters if is_trained)
    trained = "" if num_trained == count else f" ({num_trained:,} of them are trained)"
    return f"{count:,} parameters{trained}"


def model_throughput(spec: ModelSpec, run: RunSpec, model: nn.Module, groups: Groups) -> Throughput:
    """Count the parameters over all stages, and return what computes rates. Collective over all ranks."""
    held = {
        name: (parameter.logical.shape, parameter.requires_grad)  # type: ignore[attr-defined]
        for name, parameter in named_logical_parameters(model)
    }
    stages = all_gather_object(groups.control, held) if groups.pipe.size > 1 else [held]
    held = {name: parameter for stage in stages for name, parameter in stage.items()}
    layers = pluralize(len(spec.layers), "layer")
    # Towers have a prefix, and vocabularies of one size.
    entries = next(shape[0] for name, (shape, _) in held.items() if name.endswith(TOKEN_EMBEDDING))
    has_experts = any(isinstance(layer.channel, Experts) for layer in spec.layers)
    used = f", of which a token uses {active_parameters(spec, entries):,}" if has_experts else ""
    logger.info("the model has %s in %s%s", describe_size(list(held.values())), layers, used)
    flops = partial(flops_per_token, spec, entries=entries, length=run.batch.length)
    return Throughput(
        flops_per_token=flops(),
        causal_flops_per_token=flops(convention="causal"),
        num_devices=groups.world.size,
        peak_tflops=peak_tflops(device_name(), run.precision.weights)[0],
    )
