"""Values that follow from others: what is filled in when absent, and what a setting brings with it."""

from collections.abc import Iterator, Mapping
from typing import Any

from neox_launcher.config.curricula import METRICS, enabled_sampling
from neox_launcher.config.problems import Place, Problem, in_words, place_of
from neox_launcher.config.schema import NeoXConfig, parameter_named
from neox_launcher.config.sections.data_efficiency import TRUNCATES, Metric

__all__ = ["NO_EFFECT", "fill_in", "follows_from", "implied_settings"]

_DEFAULT_WEIGHT_DECAY = 0.01


# Parameters that are accepted and change nothing, and why.
NO_EFFECT: Mapping[str, str] = {
    "short_seq_prob": "it belongs to the samples of BERT",
    "sparsity_config.mode": "attention-config says the kind of every layer",
    "sparsity_config.attention": "attention is always causal",
    "sparsity_config.horizontal_global_attention": "attention is always causal",
    "optimizer.params.torch_adam": "Adam is always torch's fused one",
    "checkpoint.tag_validation": "a checkpoint's name is its iteration, which all ranks count alike",
    "checkpoint.load_universal": "every checkpoint loads under every parallel layout",
    "checkpoint.parallel_write.pipeline_stage": "all ranks write their own part at the same time",
    "data_efficiency.data_routing.random_ltd.model_mask_name": "documents travel with the tokens",
    "data_efficiency.data_routing.random_ltd.model_type": "attention is always causal",
    "data_efficiency.data_routing.random_ltd.hidden_state_order": "the model knows its own order",
    "autotuning.arg_mappings": "trials get their settings in a configuration file, not as options",
    "elasticity.min_time": "a job gets smaller when a host is lost, whenever that is",
    "zero_optimization.allgather_partitions": "updated parameters are always collected by all-gather",
    "zero_optimization.load_from_fp32_weights": "checkpoints hold the float32 weights where there are any",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "checkpoints hold whole weights",
    "zero_optimization.elastic_checkpoint": "every checkpoint can be loaded with any number of ranks",
}

# Parameters that are filled in when absent, and from what.
_FILLED_FROM = {
    "seq_length": "max_position_embeddings",
    "optimizer.params.weight_decay": "weight_decay",
}
# Parameters that a switch sets to true, whatever is written.
_IMPLIED_BY = {
    "attention_softmax_in_fp32": "apply_query_key_layer_scaling",
    "use_cpu_initialization": "lazy_mpu_init",
    "no_load_optim": "finetune",
    "no_load_rng": "finetune",
}


def follows_from(name: str, config: NeoXConfig) -> str | None:
    """The parameter that decides this one's value here; None when it is what is written, or the default."""
    switch = _IMPLIED_BY.get(name)
    if switch is not None and config.value_of(switch):
        return switch
    return None if name in config.sources else _FILLED_FROM.get(name)


def fill_in(values: dict[str, dict[str, Any]]) -> set[str]:
    """Fill the FILLED_IN fields that are absent, before validation; returns their names."""
    filled = set()
    model = values["model"]
    if "seq_length" not in model:
        filled.add("seq_length")
        if "max_position_embeddings" in model:
            model["seq_length"] = model["max_position_embeddings"]
    section = values["optimizer"]
    params = section.setdefault("optimizer", {}).setdefault("params", {})
    if "weight_decay" not in params:
        params["weight_decay"] = section.get("weight_decay", _DEFAULT_WEIGHT_DECAY)
        filled.add("optimizer.params.weight_decay")
    return filled


def implied_settings(config: NeoXConfig, places: Mapping[str, Place]) -> tuple[NeoXConfig, list[Problem]]:
    """The configuration with what its settings imply, and a notice where something else was written."""
    notices = [*_without_effect(config, places)]
    if config.attention.apply_query_key_layer_scaling and not config.attention.attention_softmax_in_fp32:
        notices += _overruled("attention_softmax_in_fp32", "apply-query-key-layer-scaling", places)
        attention = config.attention.replaced(attention_softmax_in_fp32=True)
        config = config.model_copy(update={"attention": attention})
    if config.parallelism.lazy_mpu_init and not config.model.use_cpu_initialization:
        notices += _overruled("use_cpu_initialization", "lazy-mpu-init", places)
        model = config.model.replaced(use_cpu_initialization=True)
        config = config.model_copy(update={"model": model})
    if config.checkpoint.finetune:
        checkpoint = config.checkpoint.replaced(no_load_optim=True, no_load_rng=True)
        config = config.model_copy(update={"checkpoint": checkpoint})
    weight_decay = config.optimizer.optimizer.params.weight_decay
    if "weight_decay" in places and weight_decay != config.optimizer.weight_decay:
        notices.append(
            Problem(
                "weight_decay",
                f"is not used: optimizer.params.weight_decay is {weight_decay}",
                value=str(config.optimizer.weight_decay),
                place=places["weight_decay"],
            )
        )
    return config, [*notices, *_advice(config, places)]


def _without_effect(config: NeoXConfig, places: Mapping[str, Place]) -> Iterator[Problem]:
    """What was given to parameters that change nothing; their defaults say what is done anyway."""
    for name, why in NO_EFFECT.items():
        value = config.value_of(name) if name in places else None
        if value is not None and value != parameter_named(name).default:
            yield Problem(name, f"has no effect: {why}", value=in_words(value), place=places[name])


def _advice(config: NeoXConfig, places: Mapping[str, Place]) -> Iterator[Problem]:
    """What works, and not as one would expect."""
    kind, is_fp16 = config.optimizer.optimizer.kind, config.precision.is_fp16
    if kind == "sm3" and is_fp16:
        yield _note("optimizer.type", "does not work well with fp16", "use bf16", config, places)
    if kind == "onebitadam" and "lr_decay_style" in places:
        what = "has no effect: OneBitAdam's rate follows DeepSpeed's WarmupDecayLR"
        yield _note("lr_decay_style", what, "", config, places)
    curriculum = config.data_efficiency.curriculum_learning
    step = curriculum.schedule_config.difficulty_step
    if curriculum.enabled and curriculum.curriculum_type == "seqlen" and step and step % 8 and is_fp16:
        name = "curriculum_learning.schedule_config.difficulty_step"
        yield _note(
            name, "makes lengths that tensor cores are slow at", "use a multiple of 8", config, places
        )
    yield from _curriculum_advice(config, places)


def _curriculum_advice(config: NeoXConfig, places: Mapping[str, Place]) -> Iterator[Problem]:
    """What of a curriculum that chooses samples chooses none."""
    sampling = config.data_efficiency.data_efficiency.data_sampling
    if sampling.enabled and not sampling.curriculum_learning.enabled:
        name = "data_efficiency.data_sampling.enabled"
        yield _note(name, "changes nothing without curriculum_learning", "enable it too", config, places)
    for key, metric in _measures(config).items():
        if metric.clustering_type == "single_cluster" and key != TRUNCATES:
            name = f"{METRICS}.{key}"
            what, remedy = "holds back no sample", "use schedule_based, or leave the measure out"
            place = place_of(places, name)
            yield Problem(f"{name}.clustering_type", what, remedy, value="single_cluster", place=place)


def _measures(config: NeoXConfig) -> Mapping[str, Metric]:
    sampling = enabled_sampling(config)
    return {} if sampling is None else sampling.curriculum_learning.curriculum_metrics


def _note(name: str, what: str, remedy: str, config: NeoXConfig, places: Mapping[str, Place]) -> Problem:
    return Problem(name, what, remedy, value=in_words(config.value_of(name)), place=place_of(places, name))


def _overruled(name: str, by: str, places: Mapping[str, Place]) -> list[Problem]:
    if name not in places:
        return []
    return [Problem(name, f"is set to true, because {by} is", value="false", place=places[name])]
