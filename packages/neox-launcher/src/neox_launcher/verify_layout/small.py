"""Cut a configuration to a small one in which every mechanism of it is at work.

The kinds of layers and their pattern, ties, shared layers, the ratio of heads, norms, positions, biases,
adapters, objective, optimizer, schedule, accumulation and recomputation stay as they are. Sizes become small,
and what starts later starts at once.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from neox_config import NeoXConfig, Text, load_config
from neox_config.derive.attention_layers import attention_names, types_in
from neox_config.derive.engine import chosen_engine
from neox_config.derive.experts import balances_batch, expert_width, has_experts
from neox_config.derive.optimizer_arguments import optimizer_facts
from neox_config.derive.pipeline import chunks_per_stage
from neox_config.derive.widths import mlp_width
from neox_config.facts.fused_operators import FUSED_OPERATORS
from neox_config.facts.widths import next_aligned
from neox_config.problems import in_words
from neox_config.schema.config import as_written
from neox_config.schema.sections.attention import RotaryScaling
from neox_launcher.verify_layout.sizes import Sizes

__all__ = ["Change", "Small", "reference_settings", "small_config", "with_settings"]

_STEPS = 100
_LENGTH, _BLOCK = 32, 4
# Sections that decide nothing of a step.
_LEFT_OUT = (
    *("launch", "checkpoint", "tokenizer", "logging", "generation", "serving", "monitors", "autotuning"),
    "elasticity",
)
_RECORDS = (
    *("exit_interval", "planned_seconds", "on_spike", "sdc_check_interval", "adlr_autoresume", "eigenvalue"),
    *("flops_profiler", "comms_logger", "wall_clock_breakdown", "log_interval"),
)
_LAYOUT = ("model_parallel_size", "pipe_parallel_size")
_HEAD_WIDTHS = (8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A parameter that the small configuration sets to another value."""

    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.name.replace('_', '-')} {in_words(self.before)} -> {in_words(self.after)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """A small configuration.

    Args:
        config: the configuration, without dropout.
        changes: what differs from the user's.
        dropout: the user's probabilities of dropout, by parameter.
    """

    config: NeoXConfig
    changes: tuple[Change, ...]
    dropout: Mapping[str, float]


def small_config(config: NeoXConfig, sizes: Sizes, *, keeps_sizes: bool = False) -> Small:
    """Return the small copy of a configuration.

    Args:
        config: the user's, with the layout to verify.
        sizes: the parallel sizes to run.
        keeps_sizes: only what prevents a comparison is changed (`--full`).

    Raises:
        ConfigError: the small configuration breaks a rule, which the user's does not.
    """
    given = config.given()
    changed: dict[str, Any] = {name: None for section in _LEFT_OUT for name in given.get(section, {})}
    for part in (*(() if keeps_sizes else _SMALLER), _comparable):
        changed |= part(config, sizes)
    bookkeeping = _of_the_run(config)
    small = with_settings(config, changed | bookkeeping, name="the small configuration")
    names = ("hidden_dropout", "attention_dropout", *(["lora_dropout"] if config.adapters.lora_rank else []))
    dropout = {name: config.value_of(name) for name in names}
    return Small(config=small, changes=tuple(_changes(config, small, left_out=bookkeeping)), dropout=dropout)


def _put(settings: dict[str, Any], name: str, value: Any) -> None:
    """Set a dotted name; None removes it."""
    *blocks, last = name.split(".")
    for block in blocks:
        if value is None and block not in settings:
            return
        settings[block] = dict(settings.get(block) or {})
        settings = settings[block]
    if value is None:
        settings.pop(last, None)
    else:
        settings[last] = value


def _changes(before: NeoXConfig, after: NeoXConfig, *, left_out: Collection[str]) -> Iterator[Change]:
    """Yield the changes of what determines a step, the layout first."""
    for name in (*_LAYOUT, *_flat_names(before, after)):
        values = before.value_of(name), after.value_of(name)
        if values[0] != values[1] and name not in left_out:
            yield Change(name=name, before=values[0], after=values[1])


def _flat_names(*configs: NeoXConfig) -> list[str]:
    """Return the given parameters of sections that are kept, in order."""
    names: dict[str, None] = {}
    for config in configs:
        for section, values in config.given().items():
            if section not in _LEFT_OUT:
                names |= dict.fromkeys(_leaves(values, ""))
    return [name for name in names if name not in _LAYOUT]


def _leaves(values: Mapping[str, Any], outer: str) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{outer}{name}.")
        else:
            yield f"{outer}{name}"


def _heads(config: NeoXConfig, sizes: Sizes) -> dict[str, Any]:
    """Keep the ratio of heads to key-value heads, up to 3, and the number of these if it is small."""
    model, attention = config.model, config.attention
    shared = model.num_kv_heads or model.num_attention_heads
    ratio = min(model.num_attention_heads // shared, 3)
    few = min(shared, 2 * sizes.tensor) if shared % sizes.tensor == 0 else shared
    if few % sizes.tensor:
        ratio = sizes.tensor
    part = attention.rotary_pct if attention.pos_emb == "rotary" else 1.0
    width = next((each for each in _HEAD_WIDTHS if (each * part) % 2 == 0), _HEAD_WIDTHS[-1])
    return {
        "num_attention_heads": few * ratio,
        "num_kv_heads": None if model.num_kv_heads is None else few,
        # A width that does not follow from the others.
        "head_dim": None if model.head_dim is None else 2 * width,
        "hidden_size": few * ratio * width,
    }


def _widths(config: NeoXConfig, sizes: Sizes) -> dict[str, Any]:
    """Keep the ratio of the channels of an MLP to those between layers."""
    width = _heads(config, sizes)["hidden_size"]
    inner = max(1, round(mlp_width(config) * width / config.model.hidden_size))
    return {
        "mlp_width": next_aligned(inner, ranks=sizes.tensor),
        **dict.fromkeys(("intermediate_size", "expansion_factor", "mlp_multiple_of")),
        **_experts(config, sizes, width),
        "gmlp_attn_dim": None if config.model.gmlp_attn_dim is None else 8,
        "ict_head_size": None if config.objective.ict_head_size is None else 16,
        "make_vocab_size_divisible_by": 1,
        "lora_rank": min(config.adapters.lora_rank, 4) or None,
    }


def _experts(config: NeoXConfig, sizes: Sizes, width: int) -> dict[str, Any]:
    """Keep up to 8 experts, and the ratio of their widths to the channels between layers."""
    given, whole = config.experts, config.model.hidden_size
    if not has_experts(config):
        return {}
    inner = max(1, round(expert_width(config) * width / whole))
    shared = max(1, round(given.moe_shared_width * width / whole)) if given.moe_shared_width else 0
    groups = min(given.moe_groups, 4)
    step = lcm(2 * groups if groups > 1 else 1, sizes.experts)
    number = -(-min(given.moe_num_experts, 8) // step) * step
    chosen, size = min(given.moe_top_k, number // 2), number // groups
    return {
        "moe_num_experts": number,
        "moe_top_k": chosen,
        "moe_groups": groups,
        "moe_top_groups": min(max(given.moe_top_groups, -(-chosen // size)), groups),
        "moe_expert_width": next_aligned(inner, ranks=sizes.tensor),
        "moe_shared_width": next_aligned(shared, ranks=sizes.tensor) if shared else 0,
    }


def _layers(config: NeoXConfig, sizes: Sizes) -> dict[str, Any]:
    """Keep a period of the pattern of layers, shared layers, and whether stages have unequal shares."""
    model = config.model
    kinds = _period(attention_names(config))
    chunks = sizes.stages * chunks_per_stage(config)
    interval = config.experts.moe_expert_interval
    few = config.experts.moe_layers is not None or 1 < interval < model.num_layers
    least = max(2, chunks, len(kinds), 4 if few else 0)
    unique = None if model.num_unique_layers is None else min(model.num_unique_layers, least)
    if unique is not None:
        least = -(-max(least, 2 * unique) // unique) * unique
    elif sizes.stages > 1 and model.num_layers % max(1, config.parallelism.pipe_parallel_size):
        least += least % sizes.stages == 0
    pattern = [kinds[index % len(kinds)] for index in range(least)]
    return {
        "num_layers": least,
        "num_unique_layers": unique,
        # Every second layer has experts, on each stage if there are layers enough.
        **({"moe_layers": None, "moe_expert_interval": 2} if few else {}),
        "attention_config": None if config.attention.attention_config is None else pattern,
    }


def _period(kinds: Sequence[str]) -> list[str]:
    """Return the shortest list that repeated gives these; if it is long, each kind once."""
    for length in range(1, min(len(kinds), 6) + 1):
        if all(kind == kinds[index % length] for index, kind in enumerate(kinds)):
            return list(kinds[:length])
    return list(dict.fromkeys(kinds))


def _lengths(config: NeoXConfig, sizes: Sizes) -> dict[str, Any]:
    """Make sequences short, and windows and blocks shorter than them."""
    model, attention = config.model, config.attention
    longer = model.max_position_embeddings > model.seq_length
    blocks = _LENGTH // _BLOCK
    sparsity = attention.sparsity_config
    found: dict[str, Any] = {
        "seq_length": _LENGTH,
        "max_position_embeddings": _LENGTH * (2 if longer else 1),
        "sliding_window_width": None if attention.sliding_window_width is None else _LENGTH // 4,
        "rpe_num_buckets": 8 if attention.pos_emb == "rpe" else None,
        "rpe_max_distance": 16 if attention.pos_emb == "rpe" else None,
        **_scaling("rotary_scaling.", attention.rotary_scaling, config, sizes),
    }
    for index, (name, kind) in enumerate(attention.attention_kinds.items()):
        prefix = f"attention_kinds.{name}."
        # Windows that differ from each other.
        window = None if kind.sliding_window_width is None else max(1, _LENGTH // (4 + index))
        found[f"{prefix}sliding_window_width"] = window
        found |= _scaling(f"{prefix}rotary_scaling.", kind.rotary_scaling, config, sizes)
    if "sparsity_config" in config.attention.model_fields_set or any(
        kind not in ("global", "local") for kind in types_in(config)
    ):
        found |= {
            "sparsity_config.block": _BLOCK,
            "sparsity_config.num_local_blocks": min(sparsity.num_local_blocks, blocks // 2),
            "sparsity_config.num_sliding_window_blocks": min(sparsity.num_sliding_window_blocks, 3),
            "sparsity_config.num_random_blocks": min(sparsity.num_random_blocks, blocks // 2) or None,
            "sparsity_config.num_global_blocks": min(sparsity.num_global_blocks, blocks // 2),
        }
    return found


def _scaling(prefix: str, scaling: RotaryScaling, config: NeoXConfig, sizes: Sizes) -> dict[str, Any]:
    """Extend half of the short sequences, and keep the first factors of frequencies."""
    heads, original = _heads(config, sizes), scaling.original_max_position_embeddings
    width = heads["head_dim"] or heads["hidden_size"] // heads["num_attention_heads"]
    pairs = int(width * config.attention.rotary_pct) // 2
    cut = {name: getattr(scaling, name) for name in ("short_factor", "long_factor")}
    return {
        f"{prefix}original_max_position_embeddings": None if original is None else _LENGTH // 2,
        **{f"{prefix}{name}": each and (list(each) * pairs)[:pairs] for name, each in cut.items()},
    }


def _batch(config: NeoXConfig, sizes: Sizes) -> dict[str, Any]:
    """Keep whether there are several samples per micro-batch, and several micro-batches per update."""
    training = config.training
    micro = min(training.train_micro_batch_size_per_gpu or 2, 2)
    accumulates = (training.gradient_accumulation_steps or 2) > 1 or sizes.stages > 1
    # Not the number of replicas, so that a factor tells which of both it is.
    accumulation = (2 * sizes.stages if sizes.stages > 1 else 3) if accumulates else 1
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": None,
    }


def _starts(config: NeoXConfig, sizes: Sizes) -> dict[str, Any]:
    """Start at once what starts at an iteration."""
    compression = config.compression.compression_training
    found: dict[str, Any] = {}
    for name in type(compression).model_fields:
        block = getattr(compression, name)
        shared = getattr(block, "shared_parameters", None)
        if shared is not None and shared.enabled:
            prefix = f"compression_training.{name}.shared_parameters"
            found[f"{prefix}.schedule_offset"] = 0
            if getattr(shared, "schedule_offset_end", None) is not None:
                found[f"{prefix}.schedule_offset_end"] = 1
            if getattr(shared, "num_heads", None) is not None:
                found[f"{prefix}.num_heads"] = _heads(config, sizes)["num_attention_heads"]
    if config.data_efficiency.curriculum_learning.enabled:
        found |= {"curriculum_learning.min_difficulty": 8, "curriculum_learning.max_difficulty": _LENGTH}
    steps = {"freeze_step", "var_freeze_step"} & set(optimizer_facts(config).declared)
    return found | {f"optimizer.params.{name}": 1 for name in steps}


def _comparable(config: NeoXConfig, sizes: Sizes) -> dict[str, Any]:
    """Take away what prevents a comparison: random choices, data files, a warmup from 0."""
    adapters, fp16, zero = config.adapters, config.precision.fp16, config.zero.zero_optimization
    # DeepSpeed clips before its gradients can be compared. The norm is compared nevertheless.
    clips = chosen_engine(config).name != "deepspeed"
    return {
        **({} if clips else {"gradient_clipping": 0}),
        "model_parallel_size": sizes.tensor,
        "expert_parallel_size": sizes.experts,
        "pipe_parallel_size": sizes.stages if config.parallelism.pipe_parallel_size else 0,
        # What CPUs cannot do.
        **{name: "auto" for name in FUSED_OPERATORS if config.value_of(name) is True},
        "zero_optimization.zero_quantized_weights": None,
        # At the first scale, gradients may overflow, so that an update is left out.
        **(
            {"fp16.initial_scale_power": min(fp16.initial_scale_power, 8)} if config.precision.is_fp16 else {}
        ),
        "hidden_dropout": 0,
        "attention_dropout": 0,
        "lora_dropout": 0 if adapters.lora_rank else None,
        "lora_base": "drawn" if adapters.lora_rank else None,
        # Micro-batches of all replicas have the mean over all of their tokens.
        **({"loss_normalization": "global"} if balances_batch(config) else {}),
        "warmup": 0,
        "warmup_iters": None,
        "lr_decay_iters": None,
        "lr_decay_fraction": None,
        "lr_wsd_decay_iters": None,
        "lr_wsd_decays": None,
        **({"zero_optimization.zero_hpz_partition_size": 2} if zero.zero_hpz_partition_size > 1 else {}),
        "compression_training.layer_reduction": None,
        # Ranks and one process draw other tokens, and its curriculum reads an index of the user's data.
        "data_efficiency": None,
    }


def _of_the_run(config: NeoXConfig) -> dict[str, Any]:
    """Read the small corpus, with labels and titles if the configuration has some, and record nothing."""
    data, objective = config.data, config.objective
    has_labels = data.train_label_data_paths is not None
    parts = ("train", "valid") if has_labels else ()
    return {
        **{name: None for name in type(data).model_fields if name.endswith(("_path", "_paths", "_weights"))},
        **{
            name: None for name in type(objective).model_fields if name.endswith(("_load", "_path", "_token"))
        },
        "data_cache_dir": None,
        "data_path": None if has_labels else "corpus",
        **{f"{part}_data_paths": ["corpus"] for part in parts},
        **{f"{part}_label_data_paths": ["labels"] for part in parts},
        "split": "8,2,0",
        "titles_data_path": None if objective.titles_data_path is None else "titles",
        "tokenizer_type": "HFTokenizer",
        "vocab_file": "tokenizer.json",
        "num_workers": 0,
        "train_iters": _STEPS,
        "train_epochs": None,
        "eval_iters": 1,
        "distributed_backend": None,
        **dict.fromkeys(_RECORDS),
    }


def reference_settings(config: NeoXConfig, sizes: Sizes) -> dict[str, Any]:
    """Return the settings with which one process of the torch engine does the same, plainly."""
    fusions = {name: False for name in type(config.model).model_fields if name.endswith("_fusion")}
    fusions |= {name: False for name in type(config.attention).model_fields if name.endswith("_fusion")}
    # This fusion is that of gelu's tanh form.
    is_tanh = config.model.openai_gelu or bool(config.model.bias_gelu_fusion)
    recomputation = dict.fromkeys(type(config.activation_checkpointing).model_fields)
    training = config.training
    batch = {"gradient_accumulation_steps": (training.gradient_accumulation_steps or 1) * sizes.data}
    if config.model.objective == "ict" or balances_batch(config):
        # A query is compared with the blocks of a micro-batch of all replicas, and experts are counted there.
        batch = {
            "train_micro_batch_size_per_gpu": (training.train_micro_batch_size_per_gpu or 1) * sizes.data
        }
    return {
        **batch,
        **fusions,
        "openai_gelu": is_tanh,
        **recomputation,
        "model_parallel_size": None,
        "expert_parallel_size": None,
        "pipe_parallel_size": None,
        "sequence_parallel": None,
        "pipeline_schedule": None,
        "virtual_pipeline_stages": None,
        "pipe_partition_method": None,
        "compile": False,
        "engine": "torch",
        "deepspeed": None,
        "zero_optimization": {"stage": 0},
    }


def with_settings(config: NeoXConfig, changed: Mapping[str, Any], *, name: str) -> NeoXConfig:
    """Return a configuration with other values; None removes one.

    Args:
        config: the configuration.
        changed: values by dotted name.
        name: the name of the result in messages.

    Raises:
        ConfigError: a rule refuses the result.
    """
    settings = {key: value for values in config.given().values() for key, value in values.items()}
    for key, value in changed.items():
        _put(settings, key, value)
    return load_config([], texts=[Text(json.dumps(as_written(settings), allow_nan=False), name=name)])


_SMALLER: tuple[Callable[[NeoXConfig, Sizes], dict[str, Any]], ...] = (
    _heads,
    _widths,
    _layers,
    _lengths,
    _batch,
    _starts,
)
