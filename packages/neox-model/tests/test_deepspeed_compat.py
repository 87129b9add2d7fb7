"""The range of DeepSpeed's versions; what deepspeed_compat uses of it exists and does what we expect.

`make test-contracts` runs these tests in any environment.
"""

import importlib
import inspect
from contextlib import nullcontext
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
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

from neox_model import deepspeed_compat
from neox_model.deepspeed_compat import (
    allow_any_precision,
    counters,
    disable_compilation,
    forget_process_group,
    is_partitioned,
    keep_gradients,
    loss_scale_state,
    measure_instructions,
    measure_reduction,
    never_raise_at_minimum_scale,
    refuse_other_versions,
    restore_counters,
    restore_loss_scale,
    why_not_async_io,
    zero_masters,
    zero_masters_to_model,
)
from neox_model.errors import ModelError
from support.distributed import run_ranks


def test_the_installed_version_and_the_ends_of_the_range_are_accepted():
    # __version_major__, __version_minor__, __version_patch__
    refuse_other_versions()
    refuse_other_versions((0, 19, 8))
    refuse_other_versions((0, 19, 99))


@pytest.mark.parametrize("version", [(0, 19, 7), (0, 20, 0), (1, 0, 0)])
def test_another_version_is_refused_with_the_command_that_installs_one(version):
    named = ".".join(map(str, version))
    with pytest.raises(ModelError, match=rf"DeepSpeed {named} is installed, .*'deepspeed>=0.19.8,<0.20'$"):
        refuse_other_versions(version)


def test_no_operator_is_compiled_at_startup(monkeypatch):
    # deepspeed.ops.__compatible_ops__, OpBuilder.jit_load, runtime.compiler.compile
    assert inspect.signature(OpBuilder.jit_load).parameters.keys() == {"self", "verbose"}
    assert isinstance(deepspeed.ops.__compatible_ops__, dict)
    wrapped = compiler.compile
    for owner, name in ((deepspeed.ops, "__compatible_ops__"), (OpBuilder, "jit_load")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    disable_compilation()
    assert compiler.compile is wrapped
    with pytest.raises(ModelError, match="operators are not compiled at startup"):
        AsyncIOBuilder().jit_load(verbose=False)


def test_muon_compiles_functions_at_import_by_the_replaced_function():
    module = importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    original = importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    assert "compiler.compile()" in inspect.getsource(original)
    assert inspect.isclass(module.MuonWithAuxAdam)


def test_precisions_of_the_accelerator_are_allowed():
    # is_fp16_supported
    kind = type(get_accelerator())
    before = kind.is_fp16_supported
    with allow_any_precision():
        assert get_accelerator().is_fp16_supported() is True
    assert kind.is_fp16_supported is before


def test_a_missing_operator_for_nvme_has_a_reason():
    # git_version_info.installed_ops, AsyncIOBuilder.NAME
    assert AsyncIOBuilder.NAME in deepspeed_compat.installed_ops
    reason = why_not_async_io()
    assert reason is None or reason.startswith(("is not installed", "cannot be loaded"))


def test_the_process_group_is_forgotten(monkeypatch):
    # deepspeed.comm.comm.cdb
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", object())
    assert deepspeed.comm.is_initialized is deepspeed.comm.comm.is_initialized
    forget_process_group()
    assert deepspeed.comm.comm.cdb is None


def test_every_instruction_of_a_pipeline_is_a_phase():
    # _INSTRUCTION_MAP
    kinds = PipelineEngine._INSTRUCTION_MAP
    assert {kind.__name__ for kind in kinds} == set(deepspeed_compat._PHASES)
    assert all(issubclass(kind, schedule.PipeInstruction) for kind in kinds)
    phases: list[str] = []

    class Engine:
        def __init__(self) -> None:
            self.module = nn.Linear(1, 1)
            self._INSTRUCTION_MAP = {kind: lambda engine, kind=kind: kind.__name__ for kind in kinds}

    def measure(phase: str) -> Any:
        phases.append(phase)
        return nullcontext()

    engine = Engine()
    measure_instructions(engine, measure)
    assert [run(engine) for run in engine._INSTRUCTION_MAP.values()] == [kind.__name__ for kind in kinds]
    assert phases == [deepspeed_compat._PHASES[kind.__name__] for kind in kinds]


def test_attributes_of_pipelines_are_those_that_we_set():
    # pipeline_enable_backward_allreduce, tied_comms, ds_pipe_replicated
    assert "if self.pipeline_enable_backward_allreduce:" in inspect.getsource(PipelineEngine)
    module = inspect.getsource(deepspeed.pipe.PipelineModule)
    assert "for attr_name in comm['weight_attr']:" in module
    assert "self.tied_comms" in module
    assert "p.ds_pipe_replicated = True" in module


def test_the_loss_scale_is_read_and_restored(monkeypatch):
    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda: 0)
    scaler = DynamicLossScaler(
        init_scale=2.0**16,
        scale_window=10,
        min_scale=1.0,
        delayed_shift=2,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=True,
        dtype=torch.float16,
    )
    optimizer = type("Optimizer", (), {"loss_scaler": scaler})()
    before = loss_scale_state(optimizer)
    assert before == {"cur_scale": 2.0**16, "cur_iter": 0, "last_overflow_iter": -1, "cur_hysteresis": 2}
    for _ in range(2):
        scaler.update_scale(True)
    assert loss_scale_state(optimizer) != before
    restore_loss_scale(optimizer, before)
    assert loss_scale_state(optimizer) == before
    never_raise_at_minimum_scale(optimizer)
    for _ in range(40):
        scaler.update_scale(True)
    assert scaler.cur_scale == 1.0


@pytest.mark.parametrize(
    ("owner", "name", "arguments"),
    [
        (PartitionedOptimizerSwapper, "swap_in_optimizer_state", 1),
        (PartitionedOptimizerSwapper, "swap_out_optimizer_state", 1),
        (PartitionedOptimizerSwapper, "release_swap_buffers", 1),
        (DeepSpeedZeroOptimizer_Stage3, "_swappable_optimizer_subgroup", 1),
        (DeepSpeedZeroOptimizer_Stage3, "_get_sub_group_partition_rank", 1),
        (DeepSpeedZeroOptimizer_Stage3, "_reassign_or_swap_out_partitioned_parameters", 1),
        (DeepSpeedZeroOptimizer_Stage3, "checkpoint_event_prologue", 0),
        (DeepSpeedZeroOptimizer_Stage3, "checkpoint_event_epilogue", 0),
    ],
)
def test_methods_for_states_on_nvme_and_stage_3_take_our_arguments(owner, name, arguments):
    inspect.signature(getattr(owner, name)).bind(object(), *[0] * arguments)


def test_states_on_nvme_are_known_by_the_parameter():
    # swap_params_info, parameter_id, compute_tensor
    flat, state = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
    for number, tensor in enumerate((flat, state)):
        tensor.ds_id = number
    assert OptimizerSwapper.parameter_id(state) == 1
    info = OptimizerStateSwapInfo(parameter=flat, numel=4, base_folder="none", aio_handle=None)
    info.add_state_tensors([state])
    assert [file.compute_tensor.tolist() for file in info.tensors] == [[1.0] * 4, [0.0] * 4]
    reading = inspect.getsource(PartitionedOptimizerSwapper)
    assert "swap_info = self.swap_params_info[OptimizerSwapper.parameter_id(parameter)]" in reading


# Stage, precision and dtype of sums of gradients -> the class of the optimizer.
ZERO = {
    (1, "bf16", "fp32"): "BF16_Optimizer",
    (1, "bf16", "bf16"): "DeepSpeedZeroOptimizer",
    (2, "fp16", "fp16"): "DeepSpeedZeroOptimizer",
    (3, "bf16", "bf16"): "DeepSpeedZeroOptimizer_Stage3",
}


def train_with_zero(stage: int, precision: str, sums: str) -> dict[str, Any]:
    """Return what our functions give for an engine of one rank with a small model."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with allow_any_precision():
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
    masters = list(zero_masters(optimizer))
    shapes = [list(held.local_shape) for held in masters]
    values = [_values(held).tolist() for held in masters]
    for held in masters:
        _values(held).fill_(0.5)
    zero_masters_to_model(optimizer)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        copied = all(bool((parameter == 0.5).all()) for parameter in model.parameters())
    phases: list[str] = []

    def measure(phase: str) -> Any:
        phases.append(phase)
        return nullcontext()

    measure_reduction(inner, measure)
    inner.backward(inner(torch.ones(2, 3, dtype=next(model.parameters()).dtype)).float().sum())
    inner.step()
    counted = counters(inner)
    restore_counters(inner, {"global_steps": 7, "global_samples": 9})
    had = inner.enable_backward_allreduce
    keep_gradients(inner, is_pipeline=False)
    return {
        "class": type(optimizer).__name__,
        "shapes": shapes,
        "is right": [
            torch.allclose(torch.tensor(one), other.flatten(), atol=0.01)
            for one, other in zip(values, before, strict=True)
        ],
        "copied": copied,
        "partitioned": [is_partitioned(parameter) for parameter in model.parameters()],
        "phases": phases,
        "counted": counted,
        "restored": counters(inner),
        "reduces": [had, inner.enable_backward_allreduce],
        "scale": sorted(loss_scale_state(optimizer)),
    }


def _values(held: Any) -> torch.Tensor:
    return held.holder.detach().flatten()[held.offset : held.offset + held.numel]


@pytest.mark.parametrize(("stage", "precision", "sums"), ZERO)
def test_masters_and_settings_of_a_zero_engine_are_found(stage, precision, sums):
    # _hp_mapping, ds_id, ds_numel, ds_shape, and the groups of each class
    (found,) = run_ranks(train_with_zero, size=1, stage=stage, precision=precision, sums=sums)
    assert found["class"] == ZERO[stage, precision, sums]
    assert found["shapes"] == [[2, 3], [2], [5, 2], [5]]
    assert found["is right"] == [True] * 4
    assert found["copied"]
    assert found["partitioned"] == [stage == 3] * 4
    assert found["phases"] == ["backward_allreduce"]
    assert found["counted"] == {"global_steps": 1, "global_samples": 2}
    assert found["restored"] == {"global_steps": 7, "global_samples": 9}
    assert found["reduces"] == [True, False]
    scale = ["cur_hysteresis", "cur_iter", "cur_scale", "last_overflow_iter"]
    assert found["scale"] == (scale if precision == "fp16" else [])
