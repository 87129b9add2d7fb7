"""Algorithms that give the same result in every run."""

import os

import torch

from neox_config import NeoXConfig
from neox_model.torch_compat import compile_deterministically, leave_new_memory_unfilled

__all__ = ["use_deterministic_algorithms"]


def use_deterministic_algorithms(config: NeoXConfig) -> None:
    """Let torch use only deterministic algorithms if `deterministic` is true, for the rest of this process.

    Call it before the first matrix product on a GPU.
    """
    if not config.training.deterministic:
        return
    # cuBLAS is deterministic if its workspace has a fixed size; torch requires the variable.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    leave_new_memory_unfilled()
    if config.model.compile is not False and torch.cuda.is_available():
        compile_deterministically()
