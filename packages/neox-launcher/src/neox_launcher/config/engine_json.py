"""The dict that `deepspeed.initialize` takes, with nothing in it that DeepSpeed 0.19.8 does not know.

The optimizer and the learning-rate schedule are ours and are handed to the engine as objects. With
`zero_force_ds_cpu_optimizer` off and no optimizer named here, DeepSpeed never compiles an operator.
"""

from typing import Any

from neox_launcher.config.resolve import Resolved
from neox_launcher.config.sections.engine import Aio
from neox_launcher.config.sections.zero import ZeroOptimization

__all__ = ["accumulation_dtype", "engine_json"]

# DeepSpeed reports by itself every so many iterations; this many never come.
_NEVER = 2**62

# What this DeepSpeed no longer knows.
_UNKNOWN_ZERO_KEYS = {"grad_hooks", "elastic_checkpoint"}


def engine_json(resolved: Resolved) -> dict[str, Any]:
    """DeepSpeed's configuration for this training, as plain JSON values."""
    config, derived = resolved.config, resolved.derived
    engine, is_sharded = config.engine, config.zero.zero_optimization.stage >= 1
    settings: dict[str, Any] = {
        "train_batch_size": derived.train_batch_size,
        "train_micro_batch_size_per_gpu": derived.micro_batch_size,
        "gradient_accumulation_steps": derived.accumulation,
        # Always given: DeepSpeed's default has changed once. At stage 0 neox-model clips.
        "gradient_clipping": config.optimizer.gradient_clipping if is_sharded else 0.0,
        "steps_per_print": engine.steps_per_print if "steps_per_print" in engine.model_fields_set else _NEVER,
        # Its timer of throughput waits for the device in every forward pass; only its own report shows it.
        "timers": {"throughput": {"enabled": "steps_per_print" in engine.model_fields_set}},
        "wall_clock_breakdown": engine.wall_clock_breakdown,
        "dump_state": engine.dump_state,
        "prescale_gradients": engine.prescale_gradients,
        "gradient_predivide_factor": engine.gradient_predivide_factor,
        "zero_optimization": _zero(config.zero.zero_optimization),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if config.parallelism.sequence_parallel:
        # DeepSpeed would send each tensor-parallel rank's share of what it takes for copies of one tensor.
        settings["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    if is_sharded:
        settings |= _precision(resolved)
    if engine.flops_profiler.enabled:
        settings["flops_profiler"] = engine.flops_profiler.model_dump(mode="json")
    if engine.aio.model_fields_set:
        settings["aio"] = _aio(engine.aio)
    return settings


def _precision(resolved: Resolved) -> dict[str, Any]:
    """Number formats under ZeRO. At stage 0 the update is neox-model's in every format."""
    config, precision = resolved.config, resolved.derived.precision
    settings: dict[str, Any] = {"data_types": {"grad_accum_dtype": accumulation_dtype(resolved)}}
    if precision == "fp16":
        settings["fp16"] = config.precision.fp16.model_dump(mode="json") | {"enabled": True}
    if precision == "bf16":
        # Without the immediate update, a pipeline's output projection loses its gradient: DeepSpeed clears it
        # when the backward pass reaches the hidden states, after the head has been passed.
        settings["bf16"] = {"enabled": True, "immediate_grad_update": True, "check_grad_overflow": True}
    if config.engine.communication_data_type is not None:
        settings["communication_data_type"] = config.engine.communication_data_type
    return settings


def accumulation_dtype(resolved: Resolved) -> str:
    """The format in which gradients are summed over micro-batches.

    Sums of many bf16 gradients lose their small terms, so they are summed in fp32 unless configured
    otherwise.
    """
    given = resolved.config.engine.data_types.grad_accum_dtype
    precision = resolved.derived.precision
    return given or ("fp32" if precision == "bf16" else precision)


def _aio(aio: Aio) -> dict[str, Any]:
    """DeepSpeed's name of the threads is another than the documented one, which it would not notice."""
    found = aio.model_dump(mode="json")
    return found | {"intra_op_parallelism": found.pop("thread_count")}


def _zero(zero: ZeroOptimization) -> dict[str, Any]:
    """Only what was chosen beside the stage, so that DeepSpeed's own defaults stay its own."""
    if zero.stage == 0:
        return {"stage": 0}
    found = zero.model_dump(mode="json", exclude_unset=True, exclude=_UNKNOWN_ZERO_KEYS)
    for name in ("offload_param", "offload_optimizer"):
        if found.get(name, {}).get("device", "none") == "none":
            found.pop(name, None)
    return {name: value for name, value in found.items() if value is not None} | {"stage": zero.stage}
