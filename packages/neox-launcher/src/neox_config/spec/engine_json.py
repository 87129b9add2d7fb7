"""Configuration dict for `deepspeed.initialize`: every value, but only keys that DeepSpeed 0.19.8 supports.

Some of DeepSpeed's defaults differ from the documented ones, so no value is left to them.

Optimizer and learning rate schedule are passed to the engine as objects. With `zero_force_ds_cpu_optimizer`
off and no optimizer in this dict, DeepSpeed never compiles an operator.
"""

import json
from typing import Any

from neox_config.schema.config import NeoXConfig
from neox_config.schema.sections.engine import Aio
from neox_config.schema.sections.precision import Fp16
from neox_config.schema.sections.zero import ZeroOptimization
from neox_config.spec.run import Batch, Gradients, Precision

__all__ = ["deepspeed_settings"]

# Large enough to disable DeepSpeed's periodic report.
_NEVER = 2**62

# Keys that this version of DeepSpeed no longer supports.
_UNKNOWN_ZERO_KEYS = {"grad_hooks", "elastic_checkpoint"}


def deepspeed_settings(
    config: NeoXConfig, *, precision: Precision, batch: Batch, gradients: Gradients
) -> str:
    """Return DeepSpeed's configuration for a run as JSON."""
    engine, is_sharded = config.engine, config.zero.zero_optimization.stage >= 1
    settings: dict[str, Any] = {
        "train_batch_size": batch.whole,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
        # Always set, because DeepSpeed's default has changed before. At stage 0, neox-model clips.
        "gradient_clipping": config.optimizer.gradient_clipping if is_sharded else 0.0,
        # steps_per_print is the interval of our own log lines; DeepSpeed would print raw lines next to them,
        # and its throughput timer would synchronize with the device in every forward pass.
        "steps_per_print": _NEVER,
        "timers": {"throughput": {"enabled": False}},
        # neox-model measures the phases itself; DeepSpeed would print them as raw lines.
        "wall_clock_breakdown": False,
        "dump_state": False,
        "prescale_gradients": engine.prescale_gradients,
        "gradient_predivide_factor": engine.gradient_predivide_factor,
        "zero_optimization": _zero(config.zero.zero_optimization),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # neox-model counts the operations itself; DeepSpeed counts them without pipelines only.
        "flops_profiler": {"enabled": False},
        "aio": _aio(engine.aio),
    }
    if config.parallelism.sequence_parallel:
        # DeepSpeed would treat activations as copies of one tensor and send only a part of each rank's share.
        settings["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    if is_sharded:
        settings |= _precision(config.precision.fp16, precision, gradients)
    return json.dumps(settings, allow_nan=False)


def _precision(fp16: Fp16, precision: Precision, gradients: Gradients) -> dict[str, Any]:
    """Return the precision settings under ZeRO; at stage 0, neox-model computes every update."""
    settings: dict[str, Any] = {"data_types": {"grad_accum_dtype": gradients.accumulate_in}}
    if precision.weights == "fp16":
        # DeepSpeed would cast the weights of tokens in the loss, which are no inputs of the model.
        settings["fp16"] = fp16.model_dump(mode="json") | {"enabled": True, "auto_cast": False}
    if precision.weights == "bf16":
        # Without the immediate update, the output projection of a pipeline loses its gradient: DeepSpeed
        # clears it when the backward pass reaches the hidden states, after the head.
        settings["bf16"] = {"enabled": True, "immediate_grad_update": True, "check_grad_overflow": True}
    if gradients.reduce_in is not None:
        settings["communication_data_type"] = gradients.reduce_in
    return settings


def _aio(aio: Aio) -> dict[str, Any]:
    """Return the aio block with DeepSpeed's name for thread_count; it ignores the documented name."""
    found = aio.model_dump(mode="json")
    return found | {"intra_op_parallelism": found.pop("thread_count")}


def _zero(zero: ZeroOptimization) -> dict[str, Any]:
    """Return every setting, so that a default of DeepSpeed never replaces the documented one."""
    if zero.stage == 0:
        return {"stage": 0}
    found = zero.model_dump(mode="json", exclude=_UNKNOWN_ZERO_KEYS)
    for name in ("offload_param", "offload_optimizer"):
        if found[name]["device"] == "none":
            del found[name]
    # For DeepSpeed, too, null selects a value by the stage.
    return {name: value for name, value in found.items() if value is not None}
