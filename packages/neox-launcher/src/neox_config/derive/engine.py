"""The engine of a configuration, why it was chosen, and what it offers there."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from neox_config.facts.engines import ENGINES, Capability, EngineName
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig

__all__ = [
    "NO_EFFECT_ON_TORCH",
    "EngineChoice",
    "chosen_engine",
    "engine_offers",
    "only_deepspeeds",
    "uses_pipeline",
    "why_unused_by_engine",
]


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine that trains, and why.

    Args:
        name: a key of `ENGINES`.
        reason: a clause that follows "because".
    """

    name: EngineName
    reason: str


def _stage(config: NeoXConfig) -> int:
    return config.zero.zero_optimization.stage


_BY_LAYER = "each layer's {} are one message"
_GATHERED = "each layer is gathered before it is used"

NO_EFFECT_ON_TORCH: Mapping[str, str] = {
    "zero_optimization.allgather_bucket_size": _BY_LAYER.format("weights"),
    "zero_optimization.reduce_bucket_size": _BY_LAYER.format("gradients"),
    "zero_optimization.overlap_comm": (
        "from stage 1 the reduction always overlaps with the backward pass, in pipelines from stage 2"
    ),
    "zero_optimization.reduce_scatter": (
        "gradients are always reduced with reduce-scatter; false only allows "
        "gradient_predivide_factor and prescale_gradients"
    ),
    "zero_optimization.contiguous_gradients": "gradients are always reduced from one buffer per layer",
    "zero_optimization.round_robin_gradients": "gradients are not copied to host memory",
    "zero_optimization.stage3_max_live_parameters": _GATHERED,
    "zero_optimization.stage3_max_reuse_distance": _GATHERED,
    "zero_optimization.stage3_prefetch_bucket_size": _GATHERED,
    "zero_optimization.stage3_param_persistence_threshold": "every parameter is partitioned",
    "zero_optimization.sub_group_size": "all weights of a rank are updated at once",
    "zero_optimization.ignore_unused_parameters": "weights without a gradient are always allowed",
}
"""Parameters of ZeRO that have no effect if the torch engine trains, and why."""

_NO_EFFECT_FROM_STAGE_2: Mapping[str, str] = {
    "data_types.grad_accum_dtype": "data-parallel ranks accumulate their parts of gradients in fp32",
}


def only_deepspeeds(config: NeoXConfig) -> Iterator[Problem]:
    """Yield each setting that DeepSpeed alone carries out, with the change that the torch engine requires."""
    zero, what = config.zero.zero_optimization, "is carried out by DeepSpeed's engine alone"
    # The torch engine keeps no copies of weights between updates at these stages, and its forward passes wait
    # for all ranks, whose weights they gather.
    gathers, remedy = zero.stage in (1, 2), "remove it, or set zero_optimization.stage: 0"
    asked = {
        "zero_optimization.offload_param.device": (
            zero.offload_param.device != "none",
            "remove offload_param",
        ),
        "zero_optimization.offload_optimizer.device": (
            zero.offload_optimizer.device != "none",
            "remove offload_optimizer",
        ),
        "zero_optimization.zero_quantized_weights": (zero.zero_quantized_weights, "remove it"),
        "straggler_threshold": (config.logging.straggler_threshold is not None and gathers, remedy),
        "sdc_check_interval": (config.training.sdc_check_interval is not None and gathers, remedy),
    }
    yield from (Problem(name, what, how) for name, (is_asked_for, how) in asked.items() if is_asked_for)


def chosen_engine(config: NeoXConfig) -> EngineChoice:
    """Return the engine that trains this configuration: the one that is set, or the choice of `auto`."""
    if not config.engine.deepspeed:
        return EngineChoice("torch", "deepspeed is false")
    asked = config.engine.engine
    if asked != "auto":
        return EngineChoice(asked, f"engine is {asked}")
    parallelism = config.parallelism
    if parallelism.pipe_parallel_size >= 2 and parallelism.pipeline_schedule != "1f1b":
        schedule = parallelism.pipeline_schedule
        return EngineChoice("torch", f"pipeline-schedule is {schedule}, which DeepSpeed does not have")
    first = next(only_deepspeeds(config), None)
    if first is not None:
        return EngineChoice("deepspeed", f"{first.name.replace('_', '-')} {first.what}")
    return EngineChoice("torch", "no setting requires DeepSpeed")


def uses_pipeline(config: NeoXConfig) -> bool:
    """Return True if the model is divided into pipeline stages, or DeepSpeed runs its only stage as one.

    The torch engine trains a single stage as a model without pipeline: the result is the same, and gradients
    can be averaged during the backward pass.
    """
    stages = config.parallelism.pipe_parallel_size
    return stages >= 2 or (stages == 1 and chosen_engine(config).name == "deepspeed")


def why_unused_by_engine(name: str, config: NeoXConfig) -> str:
    """Return why the engine that trains does not use a parameter; empty if it does, or ZeRO is off."""
    if _stage(config) == 0 or chosen_engine(config).name != "torch":
        return ""
    unused = NO_EFFECT_ON_TORCH if _stage(config) == 1 else {**NO_EFFECT_ON_TORCH, **_NO_EFFECT_FROM_STAGE_2}
    return f"with the torch engine, {unused[name]}" if name in unused else ""


def engine_offers(config: NeoXConfig, capability: Capability) -> bool:
    """Return True if the engine offers this with the configuration's ZeRO stage and layout."""
    offer = ENGINES[chosen_engine(config).name][capability]
    return offer.includes(_stage(config), uses_pipeline=uses_pipeline(config))
