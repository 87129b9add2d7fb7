"""Notes about given values that have no effect under the other settings."""

import re
from collections.abc import Callable, Iterator, Mapping

from neox_config.derive.adapters import base_of_adapters
from neox_config.derive.attention_layers import types_in
from neox_config.derive.engine import engine_offers, why_unused_by_engine
from neox_config.derive.experts import has_experts
from neox_config.derive.learning_rate import uses_decay_iterations
from neox_config.derive.objective import is_encoder
from neox_config.derive.recomputation import recomputes_layers
from neox_config.facts.attention import (
    ATTENTION_FACTS,
    BLOCKS_OF_ENCODER,
    ROWS_OF_ENCODER,
    RPE_OF_ENCODER,
)
from neox_config.facts.optimizers import OPTIMIZER_FACTS
from neox_config.problems import Place, Problem, in_words
from neox_config.schema.config import NeoXConfig, field_named
from neox_config.schema.parameter import condition_of, inner_section, why_not_used
from neox_config.schema.scalars import number_from

__all__ = ["is_in_use", "is_understood", "unused_values"]

_SWITCH = "remove this, or set that to true"
# `used_when` that names another parameter: "stage is 1 or 2", "pipe_parallel_size >= 1".
_CONDITION = re.compile(r"(?P<name>\w+) (is (?P<not>not )?(?P<choices>.+)|>= (?P<least>\d+))")
_LAYERS = re.compile(r"attention_config has (?P<kinds>.+) layers")
# `used_when` that depends on several values.
_OTHERS: Mapping[str, Callable[[NeoXConfig], bool]] = {
    "an init method is normal, scaled_normal or single_residual_scaled_normal": lambda config: (
        not {"normal", "scaled_normal", "single_residual_scaled_normal"}.isdisjoint(
            {config.model.init_method, config.model.output_layer_init_method}
        )
    ),
    "ZeRO is not used, or the engine is torch": lambda config: engine_offers(config, "before_update"),
    "profile or memory_profiling is true": lambda config: (
        config.logging.profile or config.logging.memory_profiling
    ),
    "eval_tasks or eval_data is set": lambda config: (
        config.generation.eval_tasks is not None or config.generation.eval_data is not None
    ),
    "load or lora_base is set": lambda config: (
        config.checkpoint.load is not None or base_of_adapters(config) is not None
    ),
    BLOCKS_OF_ENCODER: lambda config: (
        is_encoder(config) and any(ATTENTION_FACTS[kind].is_in_blocks for kind in types_in(config))
    ),
    ROWS_OF_ENCODER: lambda config: (
        is_encoder(config)
        and any("horizontal_global_attention" in ATTENTION_FACTS[kind].settings for kind in types_in(config))
    ),
    RPE_OF_ENCODER: lambda config: is_encoder(config) and config.attention.pos_emb == "rpe",
    "moe_num_experts is above 1 and moe_router_type is topk": lambda config: (
        has_experts(config) and config.experts.moe_router_type == "topk"
    ),
    "scheduler.type is null": lambda config: config.optimizer.scheduler.type is None,
    "scheduler.type is null, or its total_num_steps is needed and null": uses_decay_iterations,
    "type is OneCycle and cycle_momentum is true": lambda config: (
        config.optimizer.scheduler.type == "OneCycle" and config.optimizer.scheduler.params.cycle_momentum
    ),
    "checkpoint_activations is true and checkpoint_granularity is full": recomputes_layers,
    "training is in fp16": lambda config: config.precision.is_fp16,
    "amp computes in fp16": lambda config: config.precision.autocast == "fp16",
    "the optimizer decays weights": lambda config: (
        config.optimizer.optimizer.kind not in OPTIMIZER_FACTS
        or OPTIMIZER_FACTS[config.optimizer.optimizer.kind].decays_weights
    ),
}


def unused_values(config: NeoXConfig, places: Mapping[str, Place]) -> Iterator[Problem]:
    """Yield a note for every given value that is not used, other than its default.

    It is not used if its `used_when` does not hold, a block around it is not enabled, or the engine that
    trains does not use it. A block that the user disabled (`enabled: false`) is not noted.
    """
    yield from _in_blocks_that_are_off(config, places)
    for name, place in places.items():
        declared, value = field_named(name), config.value_of(name)
        if declared is None or value == declared.default or why_not_used(declared.description or ""):
            continue
        if _block_that_is_off(config, name) is None and (what := _why_unused(name, config)):
            yield Problem(name, f"has no effect: {what}", value=in_words(value), place=place)


def _in_blocks_that_are_off(config: NeoXConfig, places: Mapping[str, Place]) -> Iterator[Problem]:
    """Yield a note for the first given value of each block whose switch was forgotten."""
    noted: set[str] = set()
    for name, place in places.items():
        block = _block_that_is_off(config, name)
        declared = field_named(name)
        if block is None or block in noted or f"{block}.enabled" in places or declared is None:
            continue
        if config.value_of(name) in (None, declared.default):
            continue
        noted.add(block)
        what = f"has no effect: {block}.enabled is false"
        yield Problem(name, what, _SWITCH, value=in_words(config.value_of(name)), place=place)


def is_in_use(name: str, config: NeoXConfig) -> bool:
    """Return False if a parameter has no effect under the other settings; True if that is not known."""
    return _block_that_is_off(config, name) is None and not _why_unused(name, config)


def _why_unused(name: str, config: NeoXConfig) -> str:
    """Return why a parameter has no effect under the other settings; empty if it has, or is not known."""
    declared = field_named(name)
    condition = None if declared is None else condition_of(declared)
    what = "" if condition is None else _why_false(name, condition, config)
    return what or why_unused_by_engine(name, config)


def is_understood(name: str, condition: str) -> bool:
    """Return True if the condition of a parameter can be evaluated for a configuration."""
    found = _CONDITION.fullmatch(condition)
    by_value = found is not None and _decider(name, found["name"]) is not None
    return by_value or condition in _OTHERS or _LAYERS.fullmatch(condition) is not None


def _why_false(name: str, condition: str, config: NeoXConfig) -> str:
    """Return why a condition does not hold; empty if it holds or cannot be evaluated."""
    if condition in _OTHERS:
        return "" if _OTHERS[condition](config) else f"it is used only when {condition}"
    layers = _LAYERS.fullmatch(condition)
    if layers is not None:
        kinds = types_in(config)
        is_used = not kinds.isdisjoint(_listed(layers["kinds"]))
        return "" if is_used else f"it is used only when {condition}, but it has {', '.join(sorted(kinds))}"
    found = _CONDITION.fullmatch(condition)
    decider = None if found is None else _decider(name, found["name"])
    if found is None or decider is None:
        return ""
    decides = config.value_of(decider)
    return (
        "" if _holds(found, decides) else f"it is used only when {condition}, but it is {in_words(decides)}"
    )


def _decider(name: str, other: str) -> str | None:
    """Return the parameter named by a condition, searched in the block of `name` and the blocks around it."""
    outer = name.rpartition(".")[0]
    while True:
        candidate = f"{outer}.{other}" if outer else other
        declared = field_named(candidate)
        if declared is not None:
            return None if inner_section(declared) is not None else candidate
        if not outer:
            return None
        outer = outer.rpartition(".")[0]


def _holds(condition: re.Match[str], value: object) -> bool:
    if condition["least"] is not None:
        return isinstance(value, int) and value >= int(condition["least"])
    if condition["choices"] == "set":
        return value is not None
    is_listed = any(_is(choice, value) for choice in _listed(condition["choices"]))
    return is_listed is (condition["not"] is None)


def _listed(words: str) -> list[str]:
    return re.split(r", | or ", words)


def _is(choice: str, value: object) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number_from(choice) == value
    return in_words(value).casefold() == choice.casefold()


def _block_that_is_off(config: NeoXConfig, name: str) -> str | None:
    """Return the innermost block around a parameter that is not enabled, or None if all of them are."""
    outer, _, own = name.rpartition(".")
    if own == "enabled":
        outer = outer.rpartition(".")[0]
    while outer:
        if field_named(f"{outer}.enabled") is not None and not _is_enabled(config, outer):
            return outer
        outer = outer.rpartition(".")[0]
    return None


def _is_enabled(config: NeoXConfig, block: str) -> bool:
    # `precision` may enable these two instead.
    if block in ("fp16", "bf16"):
        return bool(getattr(config.precision, f"is_{block}"))
    return bool(config.value_of(f"{block}.enabled"))
