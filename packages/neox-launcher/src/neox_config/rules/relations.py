"""Rules of one form for many parameters: values that exclude each other, are in order, or divide others."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from heapq import nsmallest
from typing import Any

from neox_config.derive.attention_layers import types_in
from neox_config.extras.data_efficiency.curricula import METRICS
from neox_config.facts.attention import ATTENTION_FACTS
from neox_config.problems import Problem, in_words
from neox_config.schema.config import NeoXConfig
from neox_config.schema.parameter import InvalidValue

# A parameter -> another one that cannot be set, or true, at the same time.
_EXCLUDES: Mapping[str, str] = {
    "scaled_masked_softmax_fusion": "scaled_upper_triang_masked_softmax_fusion",
    "gpt_j_residual": "apply_residual_connection_post_layernorm",
    "override_lr_scheduler": "use_checkpoint_lr_scheduler",
    "save_growth": "save_interval",
    "exclude": "include",
    "wandb.enabled": "use_wandb",
}
_LTD = "data_efficiency.data_routing.random_ltd.random_ltd_schedule"
_PRUNING = "compression_training.sparse_pruning.shared_parameters"
# A lower limit -> the upper one.
_LIMITS: Mapping[str, str] = {
    "autotuning.start_profile_step": "autotuning.end_profile_step",
    "elasticity.min_gpus": "elasticity.max_gpus",
    "curriculum_learning.min_difficulty": "curriculum_learning.max_difficulty",
    f"{_LTD}.min_value": f"{_LTD}.max_value",
    f"{_PRUNING}.schedule_offset": f"{_PRUNING}.schedule_offset_end",
}
# A fused kernel and a parameter -> the values of it that the kernel requires.
_KERNELS: Mapping[tuple[str, str], tuple[Any, ...]] = {
    ("bias_gelu_fusion", "activation"): ("gelu",),
    ("bias_gelu_fusion", "use_bias_in_mlp"): (True,),
    # apexlayernorm selects a different kernel.
    ("layernorm_fusion", "norm"): ("layernorm",),
    ("layernorm_fusion", "use_bias_in_norms"): (True,),
    ("rmsnorm_fusion", "norm"): ("rmsnorm",),
    ("glu_fusion", "activation"): ("swiglu", "geglu", "geglu_tanh"),
    ("glu_fusion", "glu_limit"): (None,),
    ("glu_fusion", "glu_alpha"): (1.0,),
    ("glu_fusion", "glu_up_offset"): (0.0,),
    ("rope_fusion", "pos_emb"): ("rotary",),
}
_MOST_TRIED, _NAMED = 10_000, 4


def settings_exclude_each_other(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse two settings of which a configuration can have only one."""
    for name, other, *values in _valid(c, _EXCLUDES.items()):
        if all(value not in (None, "auto") and value is not False for value in values):
            both = "be true" if values[0] is True else "be set"
            yield Problem(name, f"and {other.replace('_', '-')} cannot both {both}", "keep one of the two")


def limits_are_in_order(c: NeoXConfig) -> Iterator[Problem]:
    """Require each upper limit to be at least the lower one."""
    limits = dict(_LIMITS)
    with suppress(InvalidValue):
        metrics = c.data_efficiency.data_efficiency.data_sampling.curriculum_learning.curriculum_metrics
        limits |= {f"{METRICS}.{key}.min_difficulty": f"{METRICS}.{key}.max_difficulty" for key in metrics}
    for name, other, lower, upper in _valid(c, limits.items()):
        if lower is not None and upper is not None and upper < lower:
            yield Problem(other, f"is less than {name.rpartition('.')[2]}: {lower}", f"use at least {lower}")


def sizes_divide_others(c: NeoXConfig) -> Iterator[Problem]:
    """Require heads to divide the width, shared layers all layers, and blocks of tokens their sequences."""
    pairs = {"num_kv_heads": "num_attention_heads", "num_unique_layers": "num_layers"}
    with suppress(InvalidValue):
        if c.model.head_dim is None:
            pairs["num_attention_heads"] = "hidden_size"
    with suppress(InvalidValue):
        kinds = [ATTENTION_FACTS[kind] for kind in types_in(c)]
        if any(kind.is_in_blocks for kind in kinds):
            pairs["sparsity_config.block"] = "seq_length"
        if any("num_different_global_patterns" in kind.settings for kind in kinds):
            pairs["sparsity_config.num_global_blocks"] = "sparsity_config.num_local_blocks"
    for name, other, size, whole in _valid(c, pairs.items()):
        if size is not None and whole % size:
            divisors = [each for each in range(1, min(whole, _MOST_TRIED) + 1) if whole % each == 0]
            near = sorted(nsmallest(_NAMED, divisors, key=lambda divisor: abs(divisor - size)))
            what = f"does not divide {other.rpartition('.')[2].replace('_', '-')}: {whole}"
            yield Problem(name, what, f"use {', '.join(map(str, near))}")


def kernels_suit_the_model(c: NeoXConfig) -> Iterator[Problem]:
    """Require what a fused kernel computes, if it is required."""
    for kernel, name, is_required, value in _valid(c, _KERNELS):
        allowed = _KERNELS[kernel, name]
        if is_required is True and value not in allowed:
            needed = f"{name.replace('_', '-')}: {' or '.join(map(in_words, allowed))}"
            what = f"requires {needed}, not {in_words(value)}"
            yield Problem(kernel, what, f"set {kernel.replace('_', '-')}: false, or {needed}")


def _valid(c: NeoXConfig, pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield pairs of parameters with their values, without those of which one is itself invalid."""
    for name, other in pairs:
        with suppress(InvalidValue):
            yield name, other, c.value_of(name), c.value_of(other)
