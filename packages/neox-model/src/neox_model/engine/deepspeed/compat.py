"""Everything that uses DeepSpeed beyond its documented interface: replaced functions, internals, layouts.

A test holds that no other module does. Each use has a contract in `contracts.py`.
"""

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime import compiler
from torch import Tensor
from torch.nn import Parameter

from neox_model.errors import ModelError
from neox_model.parallel.held import Held

__all__ = [
    "allow_any_precision",
    "counters",
    "disable_compilation",
    "forget_process_group",
    "is_partitioned",
    "keep_gradients",
    "loss_scale_state",
    "mark_stage_copies",
    "measure_instructions",
    "measure_reduction",
    "never_raise_at_minimum_scale",
    "restore_counters",
    "restore_loss_scale",
    "sum_tied_weights",
    "why_not_async_io",
    "zero_masters",
    "zero_masters_to_model",
    "zero_states_in_memory",
]

# Starting


def disable_compilation() -> None:
    """Replace DeepSpeed's compilation of operators by an error, and its use of torch.compile at import.

    DeepSpeed compiles an operator on first use. A training that is killed meanwhile leaves a lock file that
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


_COUNTERS = ("global_steps", "global_samples")


def counters(inner: Any) -> dict[str, int]:
    """Return an engine's numbers of updates and samples, which its profiler and schedules use."""
    return {name: int(getattr(inner, name)) for name in _COUNTERS}


def restore_counters(inner: Any, state: Mapping[str, Any]) -> None:
    """Restore the numbers from `counters`."""
    for name in _COUNTERS:
        setattr(inner, name, state[name])


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


# Loss scale of the ZeRO optimizers


_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def never_raise_at_minimum_scale(optimizer: Any) -> None:
    """Let the loss scale stay at its minimum after an overflow there; the hook `guard` handles this case."""
    optimizer.loss_scaler.raise_error_at_min_scale = False


def loss_scale_state(optimizer: Any) -> dict[str, Any]:
    """Return the state of the loss scale; empty if it does not change (in other precisions it is 1)."""
    scaler = getattr(optimizer, "loss_scaler", None)
    if not getattr(scaler, "dynamic", False):
        return {}
    return {name: getattr(scaler, name) for name in _LOSS_SCALE}


def restore_loss_scale(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Restore the state of the loss scale, if it changes; missing entries stay as configured."""
    scaler = getattr(optimizer, "loss_scaler", None)
    if scaler is None or not getattr(scaler, "dynamic", False):
        return
    for name in _LOSS_SCALE:
        if state.get(name) is not None:
            setattr(scaler, name, state[name])
    # The configured hysteresis may have become smaller.
    scaler.cur_hysteresis = min(scaler.cur_hysteresis, scaler.delayed_shift)


# Master weights of the ZeRO optimizers. Each class partitions and flattens the parameters differently:
# `runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py`, `runtime/bf16_optimizer.py`.


def is_partitioned(parameter: Parameter) -> bool:
    """Return True if ZeRO stage 3 partitions the parameter."""
    return hasattr(parameter, "ds_id")


# Class -> its parameters by group, and this rank's flat partition of each group.
_GROUPS = {
    "BF16_Optimizer": ("bf16_groups", "fp32_groups_flat_partition"),
    "DeepSpeedZeroOptimizer": ("bit16_groups", "single_partition_of_fp32_groups"),
    "DeepSpeedZeroOptimizer_Stage3": ("fp16_groups", "fp32_partitioned_groups_flat"),
}


def zero_masters(optimizer: Any) -> Iterator[Held]:
    """Yield this rank's runs of the parameters, in the order of the optimizer.

    Raises:
        ModelError: the optimizer's class is not known.
    """
    name = _known_class(optimizer)
    groups, partitions = (getattr(optimizer, attribute) for attribute in _GROUPS[name])
    for index, (params, partition) in enumerate(zip(groups, partitions, strict=True)):
        if name == "DeepSpeedZeroOptimizer_Stage3":
            yield from _held_zero_3(optimizer, index, params, partition)
            continue
        # The runs given by DeepSpeed's fragment addresses, for parameters that this rank holds.
        for param in params:
            mapping = param._hp_mapping
            if mapping is not None:
                here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield Held(param, here.start, here.numel, partition, there.start, tuple(param.shape))


def _known_class(optimizer: Any) -> str:
    name = type(optimizer).__name__
    if name not in _GROUPS:
        raise ModelError(
            f"cannot checkpoint the engine's optimizer class {name}; supported: {', '.join(_GROUPS)}"
        )
    return name


def _held_zero_3(optimizer: Any, index: int, params: list[Any], flat: Tensor) -> Iterator[Held]:
    """Yield this rank's runs: each parameter is padded and split into equal runs over data-parallel ranks."""
    if not flat.numel():
        raise ModelError("master weights offloaded to nvme are read outside Update.in_memory")
    rank, offset = optimizer._get_sub_group_partition_rank(index), 0
    for param in params:
        length = param.partition_numel()
        start = rank * length
        numel = min(length, param.ds_numel - start)
        if numel > 0:
            yield Held(param, start, numel, flat, offset, tuple(param.ds_shape))
        offset += length


@contextlib.contextmanager
def zero_states_in_memory(optimizer: Any, *, changes: bool) -> Iterator[None]:
    """Read master weights and states that are offloaded to NVMe into memory for the block.

    DeepSpeed's own buffers hold the states of one sub-group at a time, so that these are copies.

    Args:
        optimizer: a ZeRO optimizer of DeepSpeed.
        changes: write the copies back after the block, unless it fails.
    """
    if not getattr(optimizer, "swap_optimizer", False):
        yield
        return
    # DeepSpeed keeps small sub-groups in memory.
    flats = enumerate(optimizer.fp32_partitioned_groups_flat)
    offloaded = [flat for index, flat in flats if optimizer._swappable_optimizer_subgroup(index)]
    swapper = optimizer.optimizer_swapper
    try:
        for flat in offloaded:
            _read_states(swapper, flat)
        yield
        if changes:
            for flat in offloaded:
                swapper.swap_out_optimizer_state(flat)
    finally:
        for flat in offloaded:
            swapper.release_swap_buffers(flat)


def _read_states(swapper: Any, flat: Tensor) -> None:
    """Replace the tensors of one sub-group, which are empty between updates, by copies of their files."""
    swapper.swap_in_optimizer_state(flat)
    # The last update's gradient was read along with them.
    flat.grad = None
    files = swapper.swap_params_info[swapper.parameter_id(flat)].tensors
    copies = [file.compute_tensor.data.clone() for file in files]
    swapper.release_swap_buffers(flat)
    for file, copy in zip(files, copies, strict=True):
        file.compute_tensor.data = copy


def zero_masters_to_model(optimizer: Any) -> None:
    """Copy the master weights into the model's weights. Collective."""
    if _known_class(optimizer) != "DeepSpeedZeroOptimizer_Stage3":
        optimizer.update_lp_params()
        return
    optimizer.checkpoint_event_prologue()
    for index in range(len(optimizer.fp32_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(index)
    optimizer.checkpoint_event_epilogue()
