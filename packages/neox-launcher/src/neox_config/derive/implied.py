"""Values that follow from other values: filled in if not given, or implied by another setting."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from neox_config.counted import counted
from neox_config.derive.curricula import METRICS, enabled_sampling
from neox_config.derive.engine import chosen_engine
from neox_config.derive.learning_rate import peak_instead_of_lr
from neox_config.derive.local_steps import first_local_step, last_average
from neox_config.derive.widths import MLP_SIZES, mlp_width
from neox_config.facts.activations import ACTIVATION_FACTS
from neox_config.facts.optimizers import FORMS_OF_ADAM, OPTIMIZER_FACTS
from neox_config.problems import Place, Problem, in_words, place_of
from neox_config.schema.config import NeoXConfig, parameter_named
from neox_config.schema.parameter import is_filled_in
from neox_config.schema.sections.data_efficiency import TRUNCATES, Metric

__all__ = ["NO_EFFECT", "default_in", "fill_in", "follows_from", "implied_settings"]

_DEFAULT_WEIGHT_DECAY = 0.01


# Parameters that are accepted and have no effect, and why.
NO_EFFECT: Mapping[str, str] = {
    "faiss_use_gpu": "FAISS is not used: the search is exact, and runs on the GPU if there is one",
    "sparsity_config.mode": "attention-config sets the type of each layer",
    "fp16.auto_cast": "the inputs of the model are token ids, which are not cast",
    "optimizer.params.torch_adam": "Adam always uses the fused implementation of PyTorch",
    "optimizer.params.comm_backend_name": "momenta are averaged through distributed_backend",
    "optimizer.params.cuda_aware": "it is for MPI, and momenta are averaged through distributed_backend",
    "checkpoint.tag_validation": "checkpoints are named after the iteration, which is the same on all ranks",
    "checkpoint.load_universal": "every checkpoint loads under every parallel layout",
    "checkpoint.parallel_write.pipeline_stage": "all ranks always write their parts in parallel",
    "data_efficiency.data_routing.random_ltd.hidden_state_order": "the model always uses the same order",
    "autotuning.arg_mappings": "trials receive their settings in a configuration file",
    "elasticity.min_time": "a job shrinks whenever a host is lost",
    "zero_optimization.allgather_partitions": "updated parameters are always collected with all-gather",
    "zero_optimization.load_from_fp32_weights": "checkpoints contain the float32 weights if there are any",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "checkpoints always contain whole weights",
    "dump_state": "neox-config show prints all settings, and neox-config show --engine those of DeepSpeed",
    "zero_optimization.grad_hooks": "the engine chooses when stage 1 reduces gradients; the mean is the same",
    "zero_optimization.elastic_checkpoint": "every checkpoint loads with any number of ranks",
}

# Above this, a learning rate of Adam is probably a mistake.
_HIGH_RATE = 0.2
# Trainings of fewer iterations need no checkpoint before their end.
_WORTH_SAVING = 50
# Parameters that are filled in if not given -> source of the value.
_FILLED_FROM = {
    "seq_length": "max_position_embeddings",
    "optimizer.params.weight_decay": "weight_decay",
}
# Parameters that a switch sets to true, even if false is given.
_IMPLIED_BY = {
    "attention_softmax_in_fp32": "apply_query_key_layer_scaling",
    "use_cpu_initialization": "lazy_mpu_init",
    "no_load_optim": "finetune",
    "no_load_rng": "finetune",
}


def follows_from(name: str, config: NeoXConfig) -> str | None:
    """Return the parameter that determines this one's value, or None if it is given or the default."""
    switch = _IMPLIED_BY.get(name)
    if switch is not None and config.value_of(switch):
        return switch
    if name in config.sources:
        return None
    if name == "log_interval":
        return "steps_per_print" if config.engine.steps_per_print is not None else None
    return _FILLED_FROM.get(name)


def default_in(config: NeoXConfig, name: str, declared: FieldInfo) -> Any:
    """Return the default of a parameter; that of a FILLED_IN one is the value that it is filled in from."""
    if is_filled_in(declared):
        return config.value_of(_FILLED_FROM[name])
    return declared.get_default(call_default_factory=True)


def fill_in(values: dict[str, dict[str, Any]]) -> set[str]:
    """Fill in the absent FILLED_IN fields before validation, and return their names."""
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
    """Return the configuration with its implied settings, and a notice for each overridden value."""
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
    config, more = _with_steps_per_print(config, places)
    notices += more
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


def _with_steps_per_print(
    config: NeoXConfig, places: Mapping[str, Place]
) -> tuple[NeoXConfig, list[Problem]]:
    """Use DeepSpeed's interval for our log lines unless log-interval is given; note where they differ."""
    steps, interval = config.engine.steps_per_print, config.logging.log_interval
    if steps is None or steps == interval:
        return config, []
    if "log_interval" in places:
        what = f"has no effect: log-interval is {interval}"
        return config, [_note("steps_per_print", what, "", config, places)]
    return config.model_copy(update={"logging": config.logging.replaced(log_interval=steps)}), []


def _without_effect(config: NeoXConfig, places: Mapping[str, Place]) -> Iterator[Problem]:
    """Yield a notice for each parameter without effect that has a value other than its default."""
    for name, why in NO_EFFECT.items():
        value = config.value_of(name) if name in places else None
        if value is not None and value != parameter_named(name).default:
            yield Problem(name, f"has no effect: {why}", value=in_words(value), place=places[name])


def _schedule_after_the_end(config: NeoXConfig, places: Mapping[str, Place]) -> Iterator[Problem]:
    """Note a training that ends before its learning rate has decayed, as a shorter run of another one."""
    schedule, section = config.lr_schedule, config.checkpoint
    last, decay = config.training.train_iters, schedule.lr_decay_iters
    if last is None or decay is None or decay <= last or config.optimizer.scheduler.type is not None:
        return
    if schedule.lr_decay_style == "constant" or not {"train_iters", "lr_decay_iters"} <= places.keys():
        return
    what = (
        "ends the training before its learning rate has reached min-lr: the schedule has "
        f"{counted(decay, 'iteration')} ({places['lr_decay_iters']})"
    )
    remedy = f"set lr-decay-iters: {last}, too"
    if (schedule.warmup_iters or 0) > last:
        remedy += f", and warmup-iters to at most {last}"
    if section.load is not None and not section.finetune and not schedule.override_lr_scheduler:
        remedy += "; if this continues a checkpoint, also override-lr-scheduler: true"
    yield _note("train_iters", what, remedy, config, places)


def _advice(config: NeoXConfig, places: Mapping[str, Place]) -> Iterator[Problem]:
    """Yield notices about valid settings with unexpected results."""
    kind, is_fp16 = config.optimizer.optimizer.kind, config.precision.is_fp16
    if "attention_softmax_in_fp32" in places and not config.attention.attention_softmax_in_fp32:
        what = "has no effect: the softmax of attention is always computed in float32"
        yield _note("attention_softmax_in_fp32", what, "remove it", config, places)
    yield from _schedule_after_the_end(config, places)
    if kind == "sm3" and is_fp16:
        yield _note("optimizer.type", "does not work well with fp16", "use bf16", config, places)
    peak, lr = peak_instead_of_lr(config), config.optimizer.optimizer.params.lr
    if peak is not None and "optimizer.params.lr" in places and config.value_of(peak) != lr:
        what = f"has no effect: scheduler.type is {config.optimizer.scheduler.type}, which uses {peak}"
        yield _note("optimizer.params.lr", what, "", config, places)
    if config.optimizer.scheduler.type is not None and "lr_decay_style" in places:
        what = f"has no effect: scheduler.type is {config.optimizer.scheduler.type}"
        yield _note("lr_decay_style", what, "remove it", config, places)
    elif kind == "onebitadam" and "lr_decay_style" in places:
        what = "has no effect: OneBitAdam uses DeepSpeed's WarmupDecayLR schedule"
        yield _note("lr_decay_style", what, "", config, places)
    curriculum = config.data_efficiency.curriculum_learning
    step = curriculum.schedule_config.difficulty_step
    if curriculum.enabled and curriculum.curriculum_type == "seqlen" and step and step % 8 and is_fp16:
        name = "curriculum_learning.schedule_config.difficulty_step"
        yield _note(
            name,
            "gives sequence lengths that are slow on tensor cores",
            "use a multiple of 8",
            config,
            places,
        )
    if kind in FORMS_OF_ADAM and "optimizer.params.lr" in places and lr is not None and lr > _HIGH_RATE:
        what = "is high: with Adam, models are trained with rates of 0.00005 to 0.01"
        yield _note("optimizer.params.lr", what, "use a value such as 0.0003", config, places)
    yield from _reduction_advice(config, places)
    yield from _compression_advice(config, places)
    yield from _saving_advice(config, places)
    yield from _curriculum_advice(config, places)
    yield from _width_advice(config, places)


def _reduction_advice(config: NeoXConfig, places: Mapping[str, Place]) -> Iterator[Problem]:
    """Yield a notice about prescale_gradients where gradients are divided first in any case."""
    zero, name = config.zero.zero_optimization, "prescale_gradients"
    # DeepSpeed's stage 1 in bf16 reduces whole gradients, unless they are accumulated in bf16.
    reduces_whole = chosen_engine(config).name == "deepspeed" and zero.stage == 1 and config.precision.is_bf16
    reduces_whole &= config.engine.data_types.grad_accum_dtype in (None, "fp32")
    scatters = zero.stage >= 1 and zero.reduce_scatter and not reduces_whole
    if config.engine.prescale_gradients and (zero.stage == 3 or scatters):
        what = f"has no effect: ZeRO stage {zero.stage} divides gradients before it sums them"
        yield _note(name, what, "", config, places)


def _compression_advice(config: NeoXConfig, places: Mapping[str, Place]) -> Iterator[Problem]:
    """Yield notices about the freeze of optimizers that average over data-parallel ranks themselves."""
    optimizer, last = config.optimizer.optimizer, config.training.train_iters
    facts = OPTIMIZER_FACTS.get(optimizer.kind)
    if facts is None or not facts.replica_states:
        return
    freeze = next(name for name in ("freeze_step", "var_freeze_step") if name in facts.declared)
    full = "var_update_scaler" if freeze == "var_freeze_step" else freeze
    # Both counts of updates end before the first compression.
    if last is not None and min(getattr(optimizer.params, each) for each in (freeze, full)) >= last:
        what = f"is not before the last iteration ({last:,}): momenta are never compressed"
        yield _note(f"optimizer.params.{full}", what, f"set a smaller {full}", config, places)
        return
    for name in ("prescale_gradients", "gradient_predivide_factor", "communication_data_type"):
        if name in places and config.value_of(name) != parameter_named(name).default:
            what = f"has no effect after {freeze}: momenta are averaged instead of gradients"
            yield _note(name, what, "", config, places)
    clipper = "optimizer.params.local_step_clipper"
    if clipper in places and facts.local_states and first_local_step(config) is None:
        what = "has no effect: local steps would begin after var_freeze_step + local_step_scaler iterations"
        yield _note(clipper, what, "", config, places)
    averaged = last_average(config)
    if averaged is not None and averaged != last:
        what = (
            f"is between two averages of {facts.name}: the last checkpoint and evaluation have the weights "
            f"of the average in iteration {averaged:,}, if no update is skipped"
        )
        yield _note("train_iters", what, f"set train-iters: {averaged}", config, places)


def _saving_advice(config: NeoXConfig, places: Mapping[str, Place]) -> Iterator[Problem]:
    """Yield notices about checkpoints between the first and the last iteration that will not be written."""
    last = config.training.train_iters
    if last is None:
        return
    yield from _saves_of_another_training(config, places, last)
    beyond = sorted(each for each in config.checkpoint.extra_save_iters or () if each > last)
    if beyond and config.checkpoint.save is not None:
        more = f" and {len(beyond) - 3:,} more" if len(beyond) > 3 else ""
        listed = ", ".join(map(str, beyond[:3]))
        what = f"contains {listed}{more}, after the last iteration ({last:,}): not saved"
        yield _note("extra_save_iters", what, "", config, places)


def _saves_of_another_training(
    config: NeoXConfig, places: Mapping[str, Place], last: int
) -> Iterator[Problem]:
    """Note a save_interval that a shorter train_iters of another file, or the command line, never reaches."""
    section = config.checkpoint
    interval = section.save_interval
    if section.save is None or interval is None or interval <= last or last < _WORTH_SAVING:
        return
    if section.save_interval_minutes is not None or section.extra_save_iters:
        return
    if not {"train_iters", "save_interval"} <= places.keys():
        return
    if places["train_iters"].file != places["save_interval"].file:
        what = f"is more than train-iters, {last:,}: the only checkpoint is the one at the end"
        remedy = f"set save-interval: {max(1, last // 10)}, too, to lose less if the training is interrupted"
        yield _note("save_interval", what, remedy, config, places)


def _width_advice(config: NeoXConfig, places: Mapping[str, Place]) -> Iterator[Problem]:
    """Yield a notice with the width that GPT-NeoX's sizes give with a gated activation."""
    model = config.model
    if not ACTIVATION_FACTS[model.activation].is_gated or model.mlp_width is not None:
        return
    for name in MLP_SIZES:
        if config.value_of(name) is not None:
            width = mlp_width(config)
            what = (
                f"gives an MLP width of {width:,}: with {model.activation}, two thirds of the size are the "
                f"width of both input matrices together, {2 * width:,} after rounding"
            )
            remedy = f"write mlp-width: {width} instead, or another mlp-width if that is not the one you want"
            yield _note(name, what, remedy, config, places)


def _curriculum_advice(config: NeoXConfig, places: Mapping[str, Place]) -> Iterator[Problem]:
    """Yield notices about curricula that do not select samples."""
    efficiency = config.data_efficiency.data_efficiency
    if efficiency.enabled and not (efficiency.data_sampling.enabled or efficiency.data_routing.enabled):
        name = "data_efficiency.enabled"
        what = "has no effect: neither data_sampling nor data_routing is enabled"
        yield _note(name, what, "enable one of them, or remove it", config, places)
    if efficiency.data_routing.enabled and not efficiency.data_routing.random_ltd.enabled:
        name = "data_efficiency.data_routing.enabled"
        yield _note(name, "has no effect without random_ltd", "enable random_ltd as well", config, places)
    sampling = config.data_efficiency.data_efficiency.data_sampling
    if sampling.enabled and not sampling.curriculum_learning.enabled:
        name = "data_efficiency.data_sampling.enabled"
        what = "has no effect without curriculum_learning"
        yield _note(name, what, "enable curriculum_learning as well", config, places)
    for key, metric in _measures(config).items():
        if metric.clustering_type == "single_cluster" and key != TRUNCATES:
            name = f"{METRICS}.{key}"
            what, remedy = "selects all samples", "use schedule_based, or remove the metric"
            place = place_of(places, name)
            yield Problem(f"{name}.clustering_type", what, remedy, value="single_cluster", place=place)


def _measures(config: NeoXConfig) -> Mapping[str, Metric]:
    sampling = enabled_sampling(config.data_efficiency)
    return {} if sampling is None else sampling.curriculum_learning.curriculum_metrics


def _note(name: str, what: str, remedy: str, config: NeoXConfig, places: Mapping[str, Place]) -> Problem:
    return Problem(name, what, remedy, value=in_words(config.value_of(name)), place=place_of(places, name))


def _overruled(name: str, by: str, places: Mapping[str, Place]) -> list[Problem]:
    if name not in places:
        return []
    return [Problem(name, f"is set to true because {by} is true", value="false", place=places[name])]
