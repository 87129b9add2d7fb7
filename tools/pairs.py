"""Every option with every other: which pairs train, which a rule refuses, and why.

`make docs` writes docs/reports/compatibility-matrix.md from the configuration's own rules and the figures of
the last sweep of precisions; `make sweep NAME=pairs` trains every pair that the document says trains.
"""

import copy
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any

from neox_config import Resolved
from neox_config.errors import ConfigError
from precision import results as precision_results
from support.settings import resolved_from

__all__ = ["OPTIONS", "SETTINGS", "Pair", "document", "first_loss", "pair_of", "pairs", "teacher_of"]

# Six heads of four, as in every test; documents of several lengths in a row of sixteen tokens.
SETTINGS: dict[str, Any] = {
    "num_layers": 2,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "make_vocab_size_divisible_by": 19,
    "tokenizer_type": "CharLevelTokenizer",
    "train_iters": 3,
    "optimizer": {"type": "Adam", "params": {"lr": 0.003}},
    "gradient_clipping": 0.5,
    "init_method_std": 0.02,
    "log_dir": "logs",
    "log_interval": 1,
    "eval_iters": 0,
    "eval_interval": 100,
}


def _attention(kind: str, **sparsity: int) -> dict[str, Any]:
    pattern = {"sparsity_config": {"block": 4, **sparsity}} if sparsity else {}
    return {"attention_config": [[[kind], "all"]], **pattern}


_TOKEN_DROPPING = {
    "data_efficiency": {
        "enabled": True,
        "data_routing": {
            "enabled": True,
            "random_ltd": {
                "enabled": True,
                "total_layer_num": 2,
                "random_ltd_layer_num": 1,
                "random_ltd_layer_id": [1],
                "model_mask_name": "attention_mask",
                "model_type": "decoder",
                "hidden_state_order": "seq_batch_dim",
                "random_ltd_schedule": {
                    "min_value": 8,
                    "max_value": 16,
                    "schedule_type": "fixed_linear",
                    "schedule_config": {"require_steps": 3, "seq_per_step": 4},
                },
            },
        },
    }
}


def _compression(part: str, shared: dict[str, Any], **groups: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"shared_parameters": {"enabled": True, **shared}}
    return {"compression_training": {part: found | ({"different_groups": groups} if groups else {})}}


_QUANTIZED = _compression(
    "weight_quantization",
    {"quantize_weight_in_forward": True, "quantize_groups": 8, "schedule_offset": 1},
    all={"params": {"start_bits": 8, "target_bits": 4}, "modules": ["*"]},
)
_QUANTIZED_INPUTS = _compression(
    "activation_quantization", {"schedule_offset": 1}, all={"params": {"bits": 8}, "modules": ["*"]}
)
_SPARSE = _compression(
    "sparse_pruning",
    {"method": "snip_momentum", "block_pattern": "4x1", "dense_ratio": 0.5}
    | {"schedule_offset": 1, "schedule_offset_end": 2},
)
_PRUNED_ROWS = _compression(
    "row_pruning",
    {"method": "l1", "schedule_offset": 1},
    up={"params": {"dense_ratio": 0.5}, "modules": ["mlp.up"], "related_modules": [["mlp.down"]]},
)
_PRUNED_HEADS = _compression(
    "head_pruning",
    {"num_heads": 6, "schedule_offset": 1},
    all={"params": {"dense_ratio": 0.5}, "modules": ["attention.dense"]},
)
# The folder is written before: `teacher_of`. Each layer of the student is the other one of the teacher.
_TAUGHT = {
    "compression_training": {
        "layer_reduction": {
            "enabled": True,
            "teacher": "teacher",
            "module_name_prefix": "layers",
            "teacher_layer": [1, 0],
            "other_module_name": ["embedding"],
            "distill": {"enabled": True, "logits_share": 0.5, "hidden_states_weight": 0.1},
        }
    }
}

# Of the three updates, two exchange compressed momenta.
_FROZEN = {"freeze_step": 1}
# The second update exchanges compressed momenta, and each replica makes the third one alone.
_ALONE = {"var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 2}

OPTIONS: dict[str, dict[str, Any]] = {
    # Layout
    "tensor parallel": {"model_parallel_size": 2},
    "sequence parallel": {"model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipe_parallel_size": 2},
    "ZeRO 1": {"zero_optimization": {"stage": 1}},
    "ZeRO 2": {"zero_optimization": {"stage": 2}},
    "ZeRO 3": {"zero_optimization": {"stage": 3}},
    "DeepSpeed's engine": {"engine": "deepspeed"},
    "optimizer on the CPU": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "parameters on the CPU": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    # Memory and speed
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "fp16"},
    "autocast to bfloat16": {"amp": {"enabled": True, "dtype": "bf16"}},
    "autocast to float16": {"amp": {"enabled": True, "dtype": "fp16"}},
    "checkpointed activations": {"checkpoint_activations": True},
    "partitioned activations": {"checkpoint_activations": True, "partition_activations": True},
    "activations on the CPU": {"checkpoint_activations": True, "checkpoint_in_cpu": True},
    "contiguous activations": {
        "checkpoint_activations": True,
        "partition_activations": True,
        "contiguous_checkpointing": True,
    },
    # Attention
    "local attention": _attention("local"),
    "fixed sparse attention": _attention("sparse_fixed", num_local_blocks=2),
    "variable sparse attention": _attention("sparse_variable", num_random_blocks=1),
    "Longformer attention": _attention("bslongformer", num_sliding_window_blocks=3),
    "BigBird attention": _attention("bigbird", num_random_blocks=1, num_sliding_window_blocks=3),
    "gMLP": _attention("gmlp"),
    "aMLP": _attention("amlp"),
    "grouped queries": {"num_kv_heads": 2},
    "softmax in fp32": {"attention_softmax_in_fp32": True},
    "query-key layer scaling": {"apply_query_key_layer_scaling": True},
    # Positions
    "learned positions": {"pos_emb": "learned"},
    "rotary positions": {"pos_emb": "rotary", "rotary_pct": 0.5},
    "sinusoidal positions": {"pos_emb": "sinusoidal"},
    "relative positions": {"pos_emb": "rpe"},
    "ALiBi": {"pos_emb": "alibi"},
    "no positions": {"pos_emb": "none"},
    # Layers
    "rmsnorm": {"norm": "rmsnorm"},
    "scalenorm": {"norm": "scalenorm"},
    "geglu": {"activation": "geglu"},
    "parallel residual": {"gpt_j_residual": True},
    "residual after the norm": {"apply_residual_connection_post_layernorm": True},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "token dropping": _TOKEN_DROPPING,
    "untied head": {"no_weight_tying": True},
    "shared layers": {"num_unique_layers": 1},
    "initialization on the CPU": {"use_cpu_initialization": True},
    "ONNX-safe": {"onnx_safe": True},
    "compiled layers": {"compile": True},
    # Optimizers
    "1-bit Adam": {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.003, **_FROZEN}}},
    "1-bit LAMB": {"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.003, **_FROZEN}}},
    "0/1 Adam": {"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 0.003, **_ALONE}}},
    "Muon": {"optimizer": {"type": "Muon", "params": {"lr": 0.003}}},
    # Data and loss
    "attention within documents": {"reset_attention_mask": True},
    "positions within documents": {"reset_position_ids": True},
    "no loss at document ends": {"eod_mask_loss": True},
    "loss over the global batch": {"loss_normalization": "global"},
    "computed sample order": {"sample_order": "lazy"},
    "masked tokens": {"objective": "masked"},
    "fill in the middle": {"fim_rate": 0.5},
    "retrieval": {"objective": "ict", "ict_head_size": 8, "use_one_sent_docs": True},
    # Compression
    "quantized weights": _QUANTIZED,
    "quantized inputs": _QUANTIZED_INPUTS,
    "sparse weights": _SPARSE,
    "pruned rows": _PRUNED_ROWS,
    "pruned heads": _PRUNED_HEADS,
    "layers of a teacher": _TAUGHT,
    "eigenvalues": {"eigenvalue": {"enabled": True, "layer_name": "layers", "layer_num": 2, "max_iter": 3}},
    # Checkpoints, guards and measurements
    "saving in the background": {"save": "checkpoints", "save_interval": 1, "async_save": True},
    "forward check of checkpoints": {
        "save": "checkpoints",
        "save_interval": 1,
        "checkpoint_validation_with_forward_pass": True,
    },
    "spikes left out": {"on_spike": "skip", "spike_window": 3},
    "comparison of copies": {"sdc_check_interval": 1},
    "logged gradients": {"log_grad_norm": True, "log_zero_gradients": True},
    "gradient noise scale": {"log_gradient_noise_scale": True},
    "comparison of ranks": {"straggler_threshold": 1000, "wall_clock_breakdown": True},
    "traces": {"profile": True, "profile_step_start": 2, "profile_step_stop": 3},
    "counted operations": {"flops_profiler": {"enabled": True, "profile_step": 2}},
    "counted communication": {"comms_logger": {"enabled": True, "prof_all": True}},
}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two options together.

    Args:
        names: of the options.
        devices: processes that the pair trains on.
        resolved: the configuration; None where a rule refuses it.
        reason: why it is refused.
    """

    names: tuple[str, str]
    devices: int
    resolved: Resolved | None
    reason: str = ""


@cache
def pairs() -> tuple[Pair, ...]:
    """Every two options that do not give one parameter two values, on top of SETTINGS."""
    judged = (pair_of(one, other) for one, other in combinations(OPTIONS, 2))
    return tuple(pair for pair in judged if pair is not None)


def pair_of(one: str, other: str, **settings: Any) -> Pair | None:
    """Two options on top of SETTINGS and `settings`; None if they give one parameter two values."""
    options = _merged(OPTIONS[one], OPTIONS[other])
    return None if options is None else _judge((one, other), {**settings, **options})


def teacher_of(resolved: Resolved, one: str, other: str, **settings: Any) -> Resolved | None:
    """The run of the teacher of a pair of options, as long; None if the pair has none."""
    if not resolved.config.compression.compression_training.layer_reduction.enabled:
        return None
    given = {**settings, **(_merged(OPTIONS[one], OPTIONS[other]) or {})}
    del given["compression_training"]
    given |= {"save": "teacher", "save_interval": 3, "async_save": False, "seed": 7}
    return resolved_from({**SETTINGS, **given}, devices=resolved.run.layout.world)


def first_loss(resolved: Resolved, vocabulary: int) -> float:
    """The loss of a model that knows nothing, and has what its teacher has."""
    config, run = resolved.config, resolved.run
    if config.model.objective == "ict":
        return math.log(run.batch.micro * run.layout.data)
    reduction = config.compression.compression_training.layer_reduction
    return (1 - reduction.distill.logits_share * reduction.enabled) * math.log(vocabulary)


def _judge(names: tuple[str, str], options: dict[str, Any]) -> Pair:
    devices = 2 if len(options.keys() & {"model_parallel_size", "pipe_parallel_size"}) < 2 else 4
    try:
        resolved = resolved_from({**SETTINGS, **options}, devices=devices)
        return Pair(names=names, devices=devices, resolved=resolved)
    except ConfigError as error:
        problem = error.problems[0]
    reason = f"`{problem.name.replace('_', '-')}` {problem.what}"
    return Pair(names=names, devices=devices, resolved=None, reason=reason)


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """Both, or None when they give one parameter two values."""
    both = copy.deepcopy(one)
    for name, value in other.items():
        if isinstance(both.get(name), dict) and isinstance(value, dict):
            value = _merged(both[name], value)
            if value is None:
                return None
        elif both.get(name, value) != value:
            return None
        both[name] = value
    return both


def document() -> str:
    """docs/reports/compatibility-matrix.md."""
    judged = pairs()
    refused = [pair for pair in judged if pair.resolved is None]
    lines = [
        "# What goes with what",
        "",
        "Generated by `make docs` from the rules that every configuration is checked with. "
        f"Of the {len(judged):,} pairs of the options below that do not give one parameter two values, "
        f"{len(judged) - len(refused):,} train: `make sweep NAME=pairs` trains each for three iterations in "
        "two or four processes, and compares those that save with a run that resumes. "
        f"{len(refused):,} are refused before a process starts, for the reasons given.",
        "",
        "## Options",
        "",
        "| option | settings |",
        "| --- | --- |",
        *(f"| {name} | {_in_yaml(settings)} |" for name, settings in OPTIONS.items()),
        "",
        "## Refused",
        "",
        "| option | does not go with | because |",
        "| --- | --- | --- |",
        *_refusals(refused),
        "",
        *precision_results.section(),
    ]
    return "\n".join(lines) + "\n"


def _refusals(refused: list[Pair]) -> Iterator[str]:
    """One row for each option and reason; an option that goes with none comes once, and in no other row."""
    judged = (_judge((name, name), options) for name, options in OPTIONS.items())
    alone = {pair.names[0]: pair.reason for pair in judged if pair.resolved is None}
    for name, reason in alone.items():
        yield f"| {name} | by itself | {reason} |"
    rows: dict[tuple[str, str], list[str]] = {}
    for pair in refused:
        one, other = pair.names
        if one not in alone and other not in alone:
            rows.setdefault((one, pair.reason), []).append(other)
    for (name, reason), others in rows.items():
        yield f"| {name} | {', '.join(others)} | {reason} |"


def _in_yaml(settings: dict[str, Any]) -> str:
    flat = (f"{name.replace('_', '-')}: {_value(value)}" for name, value in settings.items())
    return ", ".join(f"`{entry}`" for entry in flat)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_value(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    sys.stdout.write(document())
