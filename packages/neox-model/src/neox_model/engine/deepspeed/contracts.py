"""What `compat.py`, `zero.py` and `engines.py` use of DeepSpeed beyond its documented interface."""

import importlib
import inspect
from types import SimpleNamespace
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime import compiler
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerStateSwapInfo, OptimizerSwapper
from deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper import PartitionedOptimizerSwapper
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import nn

from neox_model.contracts.expect import expect, expect_error, expect_in_source, noting
from neox_model.engine.deepspeed import compat
from neox_model.engine.deepspeed.zero import ZeroUpdate
from neox_model.errors import ModelError

__all__: list[str] = []


def no_operator_is_compiled_at_startup() -> None:
    """Check deepspeed.ops.__compatible_ops__, OpBuilder.jit_load and runtime.compiler.compile."""
    expect(set(inspect.signature(OpBuilder.jit_load).parameters), {"self", "verbose"})
    expect(type(deepspeed.ops.__compatible_ops__), dict)
    wrapped = compiler.compile
    with (
        patch.object(deepspeed.ops, "__compatible_ops__", deepspeed.ops.__compatible_ops__),
        patch.object(OpBuilder, "jit_load", OpBuilder.jit_load),
    ):
        compat.disable_compilation()
        expect(compiler.compile, wrapped)
        with expect_error(ModelError, "operators are not compiled at startup"):
            AsyncIOBuilder().jit_load(verbose=False)


def muon_compiles_functions_at_import_by_the_replaced_function() -> None:
    """Check runtime.compiler.compile in deepspeed.runtime.zero.muon."""
    compat.disable_compilation()
    module = importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    original = importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    expect_in_source(original, "compiler.compile()")
    expect(inspect.isclass(module.MuonWithAuxAdam), True)


def precisions_of_the_accelerator_are_allowed() -> None:
    """Check is_fp16_supported of the accelerator."""
    kind = type(get_accelerator())
    before = kind.is_fp16_supported
    with compat.allow_any_precision():
        expect(get_accelerator().is_fp16_supported(), True)
    expect(kind.is_fp16_supported, before)


def a_missing_operator_for_nvme_has_a_reason() -> None:
    """Check deepspeed.git_version_info.installed_ops and AsyncIOBuilder.NAME."""
    expect(AsyncIOBuilder.NAME in installed_ops, True, "the presence of its operator")
    reason = compat.why_not_async_io() or "is not installed"
    expect(reason.startswith(("is not installed", "cannot be loaded")), True, reason)


def the_process_group_is_forgotten() -> None:
    """Check deepspeed.comm.comm.cdb."""
    with patch.object(deepspeed.comm.comm, "cdb", object()):
        expect(deepspeed.comm.is_initialized, deepspeed.comm.comm.is_initialized)
        compat.forget_process_group()
        expect(deepspeed.comm.comm.cdb, None)


def every_instruction_of_a_pipeline_is_a_phase() -> None:
    """Check PipelineEngine._INSTRUCTION_MAP."""
    kinds = PipelineEngine._INSTRUCTION_MAP
    expect({kind.__name__ for kind in kinds}, set(compat._PHASES))
    expect(all(issubclass(kind, schedule.PipeInstruction) for kind in kinds), True)
    phases: list[str] = []

    class Engine:
        def __init__(self) -> None:
            self.module = nn.Linear(1, 1)
            self._INSTRUCTION_MAP = {kind: lambda engine, kind=kind: kind.__name__ for kind in kinds}

    engine = Engine()
    compat.measure_instructions(engine, noting(phases))
    names = [kind.__name__ for kind in kinds]
    expect([run(engine) for run in engine._INSTRUCTION_MAP.values()], names)
    expect(phases, [compat._PHASES[name] for name in names])


def attributes_of_pipelines_are_those_that_we_set() -> None:
    """Check pipeline_enable_backward_allreduce, tied_comms and ds_pipe_replicated of pipelines."""
    expect_in_source(PipelineEngine, "if self.pipeline_enable_backward_allreduce:")
    for text in ("for attr_name in comm['weight_attr']:", "self.tied_comms", "p.ds_pipe_replicated = True"):
        expect_in_source(deepspeed.pipe.PipelineModule, text)


def the_loss_scale_is_read_and_restored() -> None:
    """Check cur_scale, cur_iter, last_overflow_iter, cur_hysteresis and others of DynamicLossScaler."""
    scaler = DynamicLossScaler(
        init_scale=2.0**16,
        scale_window=10,
        min_scale=1.0,
        delayed_shift=2,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=True,
        dtype=torch.float16,
    )
    inner = SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler))
    update = ZeroUpdate(inner, min_loss_scale=1.0)
    with patch.object(deepspeed.comm, "get_rank", lambda: 0):
        before = update.loss_scale_state()
        expect(before, {"cur_scale": 2.0**16, "cur_iter": 0, "last_overflow_iter": -1, "cur_hysteresis": 2})
        for _ in range(2):
            scaler.update_scale(True)
        expect(update.loss_scale_state() != before, True, "another scale after overflows")
        update.load_loss_scale(before)
        expect(update.loss_scale_state(), before)
        for _ in range(40):
            scaler.update_scale(True)
        expect(scaler.cur_scale, 1.0)


def methods_for_states_on_nvme_and_stage_3_take_our_arguments() -> None:
    """Check methods of PartitionedOptimizerSwapper and DeepSpeedZeroOptimizer_Stage3."""
    for owner, name, arguments in (
        (PartitionedOptimizerSwapper, "swap_in_optimizer_state", 1),
        (PartitionedOptimizerSwapper, "swap_out_optimizer_state", 1),
        (PartitionedOptimizerSwapper, "release_swap_buffers", 1),
        (DeepSpeedZeroOptimizer_Stage3, "_swappable_optimizer_subgroup", 1),
        (DeepSpeedZeroOptimizer_Stage3, "_get_sub_group_partition_rank", 1),
        (DeepSpeedZeroOptimizer_Stage3, "_reassign_or_swap_out_partitioned_parameters", 1),
        (DeepSpeedZeroOptimizer_Stage3, "checkpoint_event_prologue", 0),
        (DeepSpeedZeroOptimizer_Stage3, "checkpoint_event_epilogue", 0),
    ):
        signature = inspect.signature(getattr(owner, name))
        try:
            signature.bind(object(), *[0] * arguments)
        except TypeError as error:
            raise TypeError(f"{owner.__name__}.{name}{signature}: {error}") from error


def states_on_nvme_are_known_by_the_parameter() -> None:
    """Check swap_params_info, parameter_id, compute_tensor and ds_id of states on NVMe."""
    flat, state = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
    for number, tensor in enumerate((flat, state)):
        tensor.ds_id = number  # type: ignore[attr-defined]
    expect(OptimizerSwapper.parameter_id(state), 1)
    info = OptimizerStateSwapInfo(parameter=flat, numel=4, base_folder="none", aio_handle=None)
    info.add_state_tensors([state])
    expect([file.compute_tensor.tolist() for file in info.tensors], [[1.0] * 4, [0.0] * 4])
    reading = "swap_info = self.swap_params_info[OptimizerSwapper.parameter_id(parameter)]"
    expect_in_source(PartitionedOptimizerSwapper, reading)


def masters_and_settings_of_zero_are_found() -> None:
    """Check _hp_mapping, bf16_groups, bit16_groups, fp16_groups, ds_id and others of ZeRO's optimizers.

    They are those of BF16_Optimizer, DeepSpeedZeroOptimizer and DeepSpeedZeroOptimizer_Stage3 (also ds_numel
    and ds_shape); and counters of the engine, and the loss scale.
    """
    for stage, precision, sums, expected in (
        (1, "bf16", "fp32", "BF16_Optimizer"),
        (1, "bf16", "bf16", "DeepSpeedZeroOptimizer"),
        (2, "fp16", "fp16", "DeepSpeedZeroOptimizer"),
        (3, "bf16", "bf16", "DeepSpeedZeroOptimizer_Stage3"),
    ):
        _train_with_zero(stage, precision, sums, expected)


def _train_with_zero(stage: int, precision: str, sums: str, expected: str) -> None:
    """Check what our functions find of an engine of one rank with a small model."""
    compat.disable_compilation()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5))
    before = [parameter.detach().flatten().clone() for parameter in model.parameters()]
    with compat.allow_any_precision():
        inner, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
            config={
                "train_micro_batch_size_per_gpu": 2,
                precision: {"enabled": True},
                "data_types": {"grad_accum_dtype": sums},
                "zero_optimization": {"stage": stage},
            },
            dist_init_required=False,
        )
    optimizer = inner.optimizer
    expect(type(optimizer).__name__, expected)
    expect([compat.is_partitioned(parameter) for parameter in model.parameters()], [stage == 3] * 4)
    update = ZeroUpdate(inner, min_loss_scale=None)
    masters = list(update.param_shards())
    expect([list(held.local_shape) for held in masters], [[2, 3], [2], [5, 2], [5]])
    values = [held.holder.detach().flatten()[held.offset : held.offset + held.numel] for held in masters]
    torch.testing.assert_close(values, before, atol=0.01, rtol=0)
    for value in values:
        value.fill_(0.5)
    update.to_model()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        expect([bool((parameter == 0.5).all()) for parameter in model.parameters()], [True] * 4)
    phases: list[str] = []
    compat.measure_reduction(inner, noting(phases))
    inner.backward(inner(torch.ones(2, 3, dtype=next(model.parameters()).dtype)).float().sum())
    inner.step()
    expect(phases, ["backward_allreduce"])
    expect((inner.global_steps, inner.global_samples), (1, 2))
    expect(inner.enable_backward_allreduce, True)
    compat.keep_gradients(inner, is_pipeline=False)
    expect(inner.enable_backward_allreduce, False)
    scale = {"cur_hysteresis", "cur_iter", "cur_scale", "last_overflow_iter"}
    expect(set(update.loss_scale_state()), scale if precision == "fp16" else set())
