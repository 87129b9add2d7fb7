"""Everything that uses DeepSpeed beyond its documented interface: replaced functions, internals, layouts.

A test holds that no other module does. Each use has a contract in `contracts.py`.
"""

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime import compiler
from torch.nn import Parameter

from neox_model.errors import ModelError

__all__ = [
    "allow_any_precision",
    "disable_compilation",
    "forget_process_group",
    "is_partitioned",
    "keep_gradients",
    "mark_stage_copies",
    "measure_instructions",
    "measure_reduction",
    "sum_tied_weights",
    "why_not_async_io",
]

# Starting


def disable_compilation() -> None:
    """Replace DeepSpeed's compilation of operators by an error, and its use of torch.compile at import.

    DeepSpeed compiles an operator on first use. A run that is killed meanwhile leaves a lock file that
    blocks every later start.
    """
    # The check for compatible operators starts compilers, and the CPU backend compiles an operator that
    # passes it.
    deepspeed.ops.__compatible_ops__ = {}
    OpBuilder.jit_load = _refuse_to_compile
    # DeepSpeed calls deprecated functions of torch.distributed, and broadcasts activations that require
    # gradients, which it sends back itself.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    warnings.filterwarnings("ignore", message="c10d::broadcast_", category=UserWarning)
    _import_muon_uncompiled()


def _refuse_to_compile(builder: OpBuilder, verbose: bool = True) -> None:
    raise ModelError(
        f"DeepSpeed's operator {builder.name} is not installed, and operators are not compiled at "
        f"startup; install DeepSpeed with DS_BUILD_{builder.name.upper()}=1, "
        "or remove the setting that requires it"
    )


def _import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon optimizer without torch.compile.

    ZeRO imports it during the first update to check whether it is in use. It never is, and wrapping its
    functions with torch.compile at import takes seconds.
    """
    wrap = compiler.compile
    compiler.compile = lambda: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = wrap


def forget_process_group() -> None:
    """Remove DeepSpeed's references to the process group, so that another one can be formed."""
    deepspeed.comm.comm.cdb = None


@contextlib.contextmanager
def allow_any_precision() -> Iterator[None]:
    """Allow float16 training on devices without float16 instructions: slower, same result."""
    kind = type(get_accelerator())
    supported = kind.is_fp16_supported
    kind.is_fp16_supported = lambda self: True
    try:
        yield
    finally:
        kind.is_fp16_supported = supported


def why_not_async_io() -> str | None:
    """Return why the operator for NVMe cannot be used; None if it can."""
    if not installed_ops.get(AsyncIOBuilder.NAME):
        return "is not installed"
    try:
        AsyncIOBuilder().load()
    # DeepSpeed raises a RuntimeError for one that was built with another PyTorch.
    except (ImportError, RuntimeError) as error:
        return f"cannot be loaded ({error})"
    return None


# Engines


def keep_gradients(inner: Any, *, is_pipeline: bool) -> None:
    """Disable an engine's reduction over data-parallel ranks: our update reduces gradients itself."""
    reduction = "pipeline_enable_backward_allreduce" if is_pipeline else "enable_backward_allreduce"
    setattr(inner, reduction, False)


# Class of a pipeline's instruction -> the phase that it is a part of.
_PHASES = {
    "LoadMicroBatch": "data",
    "ForwardPass": "forward",
    "BackwardPass": "backward_inner",
    "ReduceGrads": "backward_allreduce",
    "ReduceTiedGrads": "backward_allreduce",
    "OptimizerStep": "step",
    "SendActivation": "pipeline",
    "RecvActivation": "pipeline",
    "SendGrad": "pipeline",
    "RecvGrad": "pipeline",
}


def measure_reduction(inner: Any, measure: Callable[[str], Any]) -> None:
    """Measure an engine's reduction of gradients after each backward pass as `backward_allreduce`."""
    inner.allreduce_gradients = _measured(inner.allreduce_gradients, measure, "backward_allreduce")


def measure_instructions(inner: Any, measure: Callable[[str], Any]) -> None:
    """Measure each instruction of a pipeline engine's schedule as the phase that it is a part of.

    Evaluations run the same instructions, and are not measured.
    """

    def training_only(phase: str) -> Any:
        return measure(phase) if inner.module.training else contextlib.nullcontext()

    inner._INSTRUCTION_MAP = {
        kind: _measured(run, training_only, _PHASES[kind.__name__])
        for kind, run in inner._INSTRUCTION_MAP.items()
    }


def _measured(run: Callable[..., Any], measure: Callable[[str], Any], phase: str) -> Callable[..., Any]:
    @functools.wraps(run)
    def measured(*args: Any, **kwargs: Any) -> Any:
        with measure(phase):
            return run(*args, **kwargs)

    return measured


def sum_tied_weights(stage: Any, key: str, paths: list[str]) -> None:
    """Sum the gradients of these weights of a tied module over stages.

    DeepSpeed takes the paths before the module exists, but those of a layer are known only afterwards.

    Args:
        stage: a PipelineModule.
        key: the tied module's key.
        paths: paths of the weights in it.
    """
    if key in stage.tied_comms:
        stage.tied_comms[key]["weight_attr"] = paths


def mark_stage_copies(stage: Any) -> None:
    """Mark the copies of tied weights that other stages of a PipelineModule own, for `is_stage_copy`."""
    for parameter in stage.parameters():
        parameter.is_stage_copy = parameter.ds_pipe_replicated


def is_partitioned(parameter: Parameter) -> bool:
    """Return True if ZeRO stage 3 partitions the parameter."""
    return hasattr(parameter, "ds_id")
