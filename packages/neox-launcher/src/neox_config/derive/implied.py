"""Values that follow from other values: filled in if not given, or implied by another setting."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from neox_config.derive.engine import chosen_engine
from neox_config.derive.experts import inner_widths
from neox_config.derive.learning_rate import peak_instead_of_lr
from neox_config.derive.widths import MLP_SIZES, mlp_width
from neox_config.extras.data_efficiency.curricula import METRICS, enabled_sampling
from neox_config.extras.data_efficiency.fields import TRUNCATES
from neox_config.extras.one_bit.local_steps import first_local_step, last_average
from neox_config.facts.activations import ACTIVATION_FACTS
from neox_config.facts.optimizers import OPTIMIZER_FACTS
from neox_config.pluralize import first_few, pluralize
from neox_config.problems import Place, Problem, in_words, place_of
from neox_config.schema.config import NeoXConfig, field_named, parameter_named, section_of
from neox_config.schema.parameter import is_filled_in, why_not_used

__all__ = ["default_in", "fill_in", "follows_from", "implied_settings"]

_DEFAULT_WEIGHT_DECAY = 0.01


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
    given, notices = config, [*_without_effect(config, places)]
    for name, switch in _IMPLIED_BY.items():
        if not config.value_of(switch) or config.value_of(name):
            continue
        if name in places and switch != "finetune":
            notices.append(Problem(name, f"is set to true because {switch.replace('_', '-')} is true"))
        section = section_of(name)
        changed = getattr(config, section).replaced(**{name: True})
        config = config.model_copy(update={section: changed})
    steps, interval = config.engine.steps_per_print, config.logging.log_interval
    if steps not in (None, interval) and "log_interval" in places:
        notices.append(Problem("steps_per_print", f"has no effect: log-interval is {interval}"))
    elif steps is not None:
        # DeepSpeed's interval is that of our log lines.
        config = config.model_copy(update={"logging": config.logging.replaced(log_interval=steps)})
    decay = config.optimizer.optimizer.params.weight_decay
    if "weight_decay" in places and decay != config.optimizer.weight_decay:
        notices.append(Problem("weight_decay", f"is not used: optimizer.params.weight_decay is {decay}"))
    notices += _advice(config, places)
    return config, [_placed(notice, given, places) for notice in notices]


def _without_effect(config: NeoXConfig, places: Mapping[str, Place]) -> Iterator[Problem]:
    """Yield a notice for each parameter without effect that has a value other than its default."""
    for name in places:
        declared, value = field_named(name), config.value_of(name)
        why = None if declared is None else why_not_used(declared.description or "")
        if why is not None and declared is not None and value not in (None, declared.default):
            yield Problem(name, f"has no effect: {why}")


def _advice(config: NeoXConfig, places: Mapping[str, Place]) -> Iterator[Problem]:
    """Yield notices about valid settings with unexpected results."""
    optimizer, scheduler = config.optimizer.optimizer, config.optimizer.scheduler.type
    if "attention_softmax_in_fp32" in places and not config.attention.attention_softmax_in_fp32:
        what = "has no effect: the softmax of attention is always computed in float32"
        yield Problem("attention_softmax_in_fp32", what, "remove it")
    last, decay = config.training.train_iters, config.lr_schedule.lr_decay_iters
    decays = scheduler is None and config.lr_schedule.lr_decay_style != "constant"
    if decays and last is not None and decay is not None and decay > last:
        yield Problem(
            "train_iters",
            "ends the run before its learning rate has reached min-lr: the schedule has "
            f"{pluralize(decay, 'iteration')} (lr-decay-iters)",
            f"set lr-decay-iters: {last}, too",
        )
    peak = peak_instead_of_lr(config)
    if peak is not None and "optimizer.params.lr" in places and config.value_of(peak) != optimizer.params.lr:
        yield Problem(
            "optimizer.params.lr", f"has no effect: scheduler.type is {scheduler}, which uses {peak}"
        )
    if scheduler is not None and "lr_decay_style" in places:
        yield Problem("lr_decay_style", f"has no effect: scheduler.type is {scheduler}", "remove it")
    elif optimizer.kind == "onebitadam" and "lr_decay_style" in places:
        yield Problem("lr_decay_style", "has no effect: OneBitAdam uses DeepSpeed's WarmupDecayLR schedule")
    beyond = [each for each in config.checkpoint.extra_save_iters or () if last is not None and each > last]
    if beyond and config.checkpoint.save is not None:
        what = f"contains {first_few(sorted(beyond), 3)}, after the last iteration ({last:,}): not saved"
        yield Problem("extra_save_iters", what)
    yield from _reduction_advice(config)
    yield from _compression_advice(config, places)
    yield from _curriculum_advice(config)
    yield from _width_advice(config)


def _reduction_advice(config: NeoXConfig) -> Iterator[Problem]:
    """Yield a notice about prescale_gradients where gradients are divided first in any case."""
    zero = config.zero.zero_optimization
    # DeepSpeed's stage 1 in bf16 reduces whole gradients, unless they are accumulated in bf16.
    reduces_whole = chosen_engine(config).name == "deepspeed" and zero.stage == 1 and config.precision.is_bf16
    reduces_whole &= config.engine.data_types.grad_accum_dtype in (None, "fp32")
    scatters = zero.stage >= 1 and zero.reduce_scatter and not reduces_whole
    if config.engine.prescale_gradients and (zero.stage == 3 or scatters):
        what = f"has no effect: ZeRO stage {zero.stage} divides gradients before it sums them"
        yield Problem("prescale_gradients", what)


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
        yield Problem(f"optimizer.params.{full}", what, f"set a smaller {full}")
        return
    for name in ("prescale_gradients", "gradient_predivide_factor", "communication_data_type"):
        if name in places and config.value_of(name) != parameter_named(name).default:
            yield Problem(name, f"has no effect after {freeze}: momenta are averaged instead of gradients")
    clipper = "optimizer.params.local_step_clipper"
    if clipper in places and facts.local_states and first_local_step(config) is None:
        what = "has no effect: local steps would begin after var_freeze_step + local_step_scaler iterations"
        yield Problem(clipper, what)
    averaged = last_average(config)
    if averaged is not None and averaged != last:
        what = (
            f"is between two averages of {facts.name}: the last checkpoint and evaluation have the weights "
            f"of the average in iteration {averaged:,}, if no update is skipped"
        )
        yield Problem("train_iters", what, f"set train-iters: {averaged}")


def _width_advice(config: NeoXConfig) -> Iterator[Problem]:
    """Yield a notice with the width that GPT-NeoX's sizes give with a gated activation."""
    model = config.model
    given = [name for name in MLP_SIZES if config.value_of(name) is not None]
    # Experts have the size itself as their width.
    if "mlp_width" not in inner_widths(config):
        return
    if given and ACTIVATION_FACTS[model.activation].is_gated and model.mlp_width is None:
        width = mlp_width(config)
        yield Problem(
            given[0],
            f"gives an MLP width of {width:,}: with {model.activation}, two thirds of the size are the "
            f"width of both input matrices together, {2 * width:,} after rounding",
            f"write mlp-width: {width} instead, or another mlp-width if that is not the one you want",
        )


def _curriculum_advice(config: NeoXConfig) -> Iterator[Problem]:
    """Yield notices about curricula that do not select samples."""
    efficiency = config.data_efficiency.data_efficiency
    sampling, routing = efficiency.data_sampling, efficiency.data_routing
    if efficiency.enabled and not (sampling.enabled or routing.enabled):
        what = "has no effect: neither data_sampling nor data_routing is enabled"
        yield Problem("data_efficiency.enabled", what, "enable one of them, or remove it")
    for name, is_on, inner, is_inner_on in (
        ("data_routing", routing.enabled, "random_ltd", routing.random_ltd.enabled),
        ("data_sampling", sampling.enabled, "curriculum_learning", sampling.curriculum_learning.enabled),
    ):
        if is_on and not is_inner_on:
            yield Problem(
                f"data_efficiency.{name}.enabled", f"has no effect without {inner}", f"enable {inner} as well"
            )
    if enabled_sampling(config.data_efficiency) is None:
        return
    for key, metric in sampling.curriculum_learning.curriculum_metrics.items():
        if metric.clustering_type == "single_cluster" and key != TRUNCATES:
            what, remedy = "selects all samples", "use schedule_based, or remove the metric"
            yield Problem(f"{METRICS}.{key}.clustering_type", what, remedy)


def _placed(notice: Problem, config: NeoXConfig, places: Mapping[str, Place]) -> Problem:
    return notice.located(place_of(places, notice.name), in_words(config.value_of(notice.name)))
