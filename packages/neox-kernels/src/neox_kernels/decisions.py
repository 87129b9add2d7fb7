"""Decisions of "auto", stored on this host: times vary, and a resumed training must choose the same.

A decision is a file in the folder `decisions` of the cache of compiled operators. Its name is a hash of
everything that it depends on: the operator, its sources, the GPU, the versions of PyTorch and CUDA, and the
sizes, strides and types of the arguments. Delete the folder to repeat the trials.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from neox_kernels import build
from neox_kernels.availability import Availability
from neox_kernels.errors import KernelBuildError
from neox_kernels.operator import Operator

__all__ = ["decide", "key_of"]

logger = logging.getLogger(__name__)


def key_of(operator: Operator[..., Any], device: torch.device, arguments: tuple[Any, ...]) -> str:
    """Return a description of everything that a decision depends on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    parts = (operator.name, build.source_hash(), name, torch.__version__, torch.version.cuda)
    described = [
        f"{argument.dtype} {tuple(argument.shape)} {argument.stride()} {argument.requires_grad}"
        if isinstance(argument, Tensor)
        else repr(argument)
        for argument in arguments
    ]
    return json.dumps([*parts, *described], allow_nan=False)


def decide(key: str, find: Callable[[], Availability]) -> Availability:
    """Return the stored decision; if there is none, find it and store it.

    Nothing is stored if this user cannot write to the folder, other users can, or the disk is full.
    """
    path = build.cache_folder() / "decisions" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    try:
        build.private_folder(build.cache_folder())
        build.private_folder(path.parent)
    except KernelBuildError:
        return find()
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] == key:
            return Availability(stored["ok"], f"{stored['reason']} (stored)")
    except (OSError, ValueError, KeyError, TypeError):
        pass  # None yet, or not a whole file of this version: it is written again.
    found, aside = find(), path.with_suffix(f".{os.getpid()}")
    record = {"key": key, "ok": found.ok, "reason": found.reason}
    try:
        aside.write_text(json.dumps(record, allow_nan=False), encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        logger.warning("the choice of a kernel is not stored, and may be another one next time: %s", error)
    return found
