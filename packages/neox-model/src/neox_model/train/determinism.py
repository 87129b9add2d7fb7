"""Algorithms that give the same result in every run."""

import os

import torch

from neox_config.schema.sections.training import TrainingSection
from neox_model.torch_compat import compile_deterministically, leave_new_memory_unfilled

__all__ = ["use_deterministic_algorithms"]


def use_deterministic_algorithms(section: TrainingSection, *, compiles: bool) -> None:
    """Let torch use only deterministic algorithms if `deterministic` is true, for the rest of this process.

    Call it before the first matrix product on a GPU.

    Args:
        section: of the run.
        compiles: layers may be compiled.
    """
    if not section.deterministic:
        return
    # cuBLAS is deterministic if its workspace has a fixed size; torch requires the variable.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    leave_new_memory_unfilled()
    if compiles and torch.cuda.is_available():
        compile_deterministically()
