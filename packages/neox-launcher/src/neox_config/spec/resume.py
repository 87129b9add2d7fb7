"""Compare the configuration of a checkpoint with that of the run that resumes from it.

Every parameter declares if a change affects the model, the training, or neither. The values in effect are
compared: null is replaced by its meaning, parameters that act together are compared by their result, and
values that have no effect under the other settings are skipped.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

from pydantic import ValidationError

from neox_config.derive.adapters import adapted_matrices
from neox_config.derive.attention_layers import has_qkv_bias, sliding_window, types_in
from neox_config.derive.learning_rate import (
    final_decay_iterations,
    learning_rate_curve,
    minimum_rate,
    peak_instead_of_lr,
    uses_decay_iterations,
    warmup_fraction,
)
from neox_config.derive.optimizer_arguments import optimizer_facts, own_arguments, refused_parameters
from neox_config.derive.unused import is_in_use
from neox_config.errors import ConfigError
from neox_config.facts.attention import ATTENTION_FACTS, BIASED_SCORES, GMLP_TYPES
from neox_config.facts.optimizers import OPTIMIZER_FACTS
from neox_config.problems import in_words
from neox_config.schema.config import NeoXConfig, all_parameters, section_of, sections
from neox_config.schema.parameter import Resume, Section, entry_section, inner_section, resume_of
from neox_config.schema.sections.attention import SparsityConfig
from neox_config.schema.sections.optimizer import OptimizerParams, Scheduler, SchedulerParams
from neox_config.spec.resolve import Resolved, resolve

__all__ = [
    "IN_EFFECT",
    "LEARNING_RATE",
    "SAMPLES_PER_ITERATION",
    "Change",
    "Changes",
    "compare",
    "flat_values",
    "in_effect",
    "optimizer_kind",
    "recorded_effects",
]

# Recorded in a checkpoint in addition to the parameters.
SAMPLES_PER_ITERATION = "samples_per_iteration"
IN_EFFECT = "in_effect"

# A checkpoint contains the learning rate schedule itself, and the user chooses which of the two is used.
LEARNING_RATE = (
    *("optimizer.params.lr", "lr_decay_style", "lr_decay_iters", "min_lr", "warmup"),
    *("lr_wsd_decay_style", "lr_wsd_decay_iters"),
    *(parameter.name for parameter in Scheduler.parameters("scheduler.", "training")),
)

_ARGUMENTS = "optimizer.params."
# Versions without mlp_width recorded it under this name, whose meaning is another one today.
_FORMER_WIDTH = "intermediate_size"
# Null means every earlier token. A window has an effect only in samples that are longer.
_WINDOW = "sliding_window_width"
_UNUSED: Any = object()
_CLASSES: tuple[Resume, ...] = ("model", "training")
_LOCAL = "sparsity_config.num_local_blocks, sparsity_config.num_sliding_window_blocks (of local layers)"


@dataclass(frozen=True, slots=True)
class Change:
    """A value that differs.

    Args:
        label: the parameter, or the parameters that determine the value together.
        there: value in effect when the checkpoint was written.
        here: value in effect now.
        changes_states: True if the optimizer cannot continue from the states in the checkpoint.
    """

    label: str
    there: Any
    here: Any
    changes_states: bool = False

    @property
    def name(self) -> str:
        """Name of the parameter as shown in messages."""
        return self.label.replace("_", "-")

    def __str__(self) -> str:
        return f"{self.name}: {in_words(self.there)} in the checkpoint, {in_words(self.here)} in this run"


@dataclass(frozen=True, slots=True)
class Changes:
    """All differences in parameters that are not free to differ.

    Args:
        model: changes of the model.
        training: changes of the training.
        unknown: reason why the values could not be compared; None if they were.
    """

    model: tuple[Change, ...] = ()
    training: tuple[Change, ...] = ()
    unknown: str | None = None


def flat_values(config: NeoXConfig) -> dict[str, Any]:
    """Return the configuration as a dict of top-level parameter names to plain values."""
    dumped = config.model_dump(mode="json").values()
    return {name: value for section in dumped for name, value in section.items()}


def in_effect(resolved: Resolved, *, tokenizer: Mapping[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Return the values that determine the model and the training: class -> label -> plain value.

    Args:
        resolved: the configuration.
        tokenizer: values that follow from the tokenizer's files, by parameter.
    """
    found: dict[str, dict[str, Any]] = {resume: {} for resume in _CLASSES}
    for name, resume, written in _leaves(resolved.config):
        if resume in found:
            found[resume][name] = _value(name, written, resolved)
    found["training"] |= _optimizer_arguments(resolved)
    for label, (resume, decide) in _TOGETHER.items():
        found[resume][label] = decide(resolved)
    found["model"] |= tokenizer or {}
    return {
        resume: {label: value for label, value in values.items() if value is not _UNUSED}
        for resume, values in found.items()
    }


def compare(there: Mapping[str, Any], here: Mapping[str, Any], *, devices: int) -> Changes:
    """Return the differences between two runs.

    A value that only one run has is not a change: the other run does not use it because of other settings,
    which are compared as well. A parameter that did not exist in the checkpoint's version has its default.

    Args:
        there: parameters of the run that wrote the checkpoint, with IN_EFFECT if it was recorded.
        here: parameters of this run.
        devices: number of devices of the run that wrote the checkpoint.

    Raises:
        ConfigError: the recorded values do not have the form in which they are recorded.
    """
    recorded = recorded_effects(there)
    if not isinstance(there.get("optimizer", {}), Mapping):
        raise ConfigError("optimizer does not contain values by name")
    try:
        values = _renamed(recorded) if IN_EFFECT in there else _reconstructed(there, devices)
    except ConfigError as error:
        return Changes(unknown=str(error))
    model, training = (tuple(_differing(resume, values, there, here)) for resume in _CLASSES)
    return Changes(model=model, training=training)


def recorded_effects(recorded: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the values in effect that a run recorded, by class and name; empty if it did not record them.

    Raises:
        ConfigError: they have another form.
    """
    values = recorded.get(IN_EFFECT, {})
    if not isinstance(values, Mapping) or not all(isinstance(each, Mapping) for each in values.values()):
        raise ConfigError(f"{IN_EFFECT} does not contain values by class and name")
    return values


def _renamed(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return values in effect under today's names: mlp_width was recorded as intermediate_size before."""
    model = dict(values.get("model", {}))
    if "mlp_width" not in model and _FORMER_WIDTH in model:
        model["mlp_width"] = model.pop(_FORMER_WIDTH)
    return {**values, "model": model}


def _differing(
    resume: Resume, values: Mapping[str, Any], there: Mapping[str, Any], here: Mapping[str, Any]
) -> Iterator[Change]:
    ones, others = values.get(resume, {}), here.get(IN_EFFECT, {}).get(resume, {})
    decisive = _deciding_states(here)
    for label in dict.fromkeys((*others, *ones)):
        if label == _WINDOW and there.get(_WINDOW) == here.get(_WINDOW):
            continue  # The same window of longer samples is the same model.
        one = ones[label] if label in ones else _absent(label, there)
        other = others[label] if label in others else _absent(label, here)
        if _UNUSED not in (one, other) and one != other:
            yield Change(label, one, other, changes_states=label in decisive and bool(one) != bool(other))


def _deciding_states(recorded: Mapping[str, Any]) -> set[str]:
    """Return the arguments that, on or off, determine which optimizer states there are or what they mean."""
    facts = OPTIMIZER_FACTS.get(optimizer_kind(recorded))
    names = () if facts is None else (*facts.redefining, *facts.optional.values())
    return {f"{_ARGUMENTS}{name}" for name in names}


def _absent(label: str, recorded: Mapping[str, Any]) -> Any:
    """Return the value of a parameter that a run did not record as in effect."""
    found: Any = recorded
    for part in label.split("."):
        found = found.get(part, _UNUSED) if isinstance(found, Mapping) else _UNUSED
    if found is not _UNUSED or label in _TOGETHER:
        return _UNUSED
    if label.startswith(_ARGUMENTS):
        return _default_argument(label, recorded)
    # Groups named by the user are absent if they were not given.
    default = _defaults().get(label)
    # A default of null may stand for a value that follows from others, which is not known here.
    is_known = default is not None or label not in _DECIDES or label == _WINDOW
    return default if is_known else _UNUSED


def _default_argument(label: str, recorded: Mapping[str, Any]) -> Any:
    """Return the default of an argument that was not given; _UNUSED if the optimizer does not take it."""
    kind = optimizer_kind(recorded)
    arguments = OPTIMIZER_FACTS[kind].arguments if kind in OPTIMIZER_FACTS else {}
    default = arguments.get(label.removeprefix(_ARGUMENTS), _defaults().get(label, _UNUSED))
    return _plain(default)


def optimizer_kind(recorded: Mapping[str, Any]) -> str:
    """Return the type of a recorded configuration's optimizer, in lower case."""
    return str(recorded.get("optimizer", {}).get("type", _defaults()["optimizer.type"])).lower()


@cache
def _defaults() -> dict[str, Any]:
    return {parameter.name: parameter.default for parameter in all_parameters() if not parameter.is_block}


def _reconstructed(recorded: Mapping[str, Any], devices: int) -> dict[str, dict[str, Any]]:
    """Reconstruct the values in effect of a run that did not record them from its parameters.

    Raises:
        ConfigError: The parameters are not a valid configuration of this version.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    known = {name for kind in sections().values() for name in kind.model_fields}
    for name in known & recorded.keys():
        values[section_of(name)][name] = recorded[name]
    if "mlp_width" not in recorded:
        values["model"]["mlp_width"] = values["model"].pop(_FORMER_WIDTH, None)
    try:
        config = NeoXConfig.from_sections(values)
        if not types_in(config):
            raise ConfigError("its attention_config does not describe its layers")
        resolved = resolve(config, devices=devices)
        found = in_effect(resolved)
    except ValidationError as error:
        raise ConfigError(f"{error.error_count()} of its parameters are unknown to this version") from error
    # Not recorded: which of two parameters was given, and if an optimizer with its own default was given one.
    found["model"].pop(_LOCAL, None)
    for name in optimizer_facts(config).arguments.keys() & OptimizerParams.model_fields.keys():
        found["training"].pop(f"{_ARGUMENTS}{name}", None)
    return found


def _leaves(config: NeoXConfig) -> Iterator[tuple[str, Resume | None, Any]]:
    """Yield the name, resume class and plain value of every parameter, except secrets."""
    for name, kind in sections().items():
        yield from _leaves_of(kind, getattr(config, name).model_dump(mode="json"), "", None)


def _leaves_of(
    kind: type[Section], values: Mapping[str, Any], prefix: str, around: Resume | None
) -> Iterator[tuple[str, Resume | None, Any]]:
    for name, value in values.items():
        resume, declared = resume_of(kind, name, around), kind.model_fields.get(name)
        inner = None if declared is None else inner_section(declared)
        entry = None if declared is None else entry_section(declared)
        if inner is not None:
            yield from _leaves_of(inner, value, f"{prefix}{name}.", resume)
        elif entry is not None:
            for key, each in value.items():
                yield from _leaves_of(entry, each, f"{prefix}{name}.{key}.", resume)
        else:
            yield prefix + name, resume, value


def _value(name: str, written: Any, resolved: Resolved) -> Any:
    """Return the value in effect of a parameter, or _UNUSED."""
    if name in _DECIDES:
        return _DECIDES[name](resolved)
    block = name.partition(".")[0]
    is_used = is_in_use(name, resolved.config) and (block not in _IN_USE or _IN_USE[block](resolved))
    return written if is_used else _UNUSED


def _optimizer_arguments(resolved: Resolved) -> dict[str, Any]:
    """Return the arguments of the optimizer whose names or defaults differ from the declared parameters."""
    config = resolved.config
    values = dict.fromkeys(refused_parameters(config), _UNUSED) | own_arguments(config)
    return {f"{_ARGUMENTS}{name}": _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    """Return a value as its JSON equivalent."""
    return list(value) if isinstance(value, tuple) else value


def _by_another(resolved: Resolved) -> Any:
    """Return _UNUSED for parameters that are compared through another one or the tokenizer's files."""
    return _UNUSED


def _has(resolved: Resolved, *kinds: str) -> bool:
    return not set(kinds).isdisjoint(resolved.derived.attention_types)


def _where(is_used: Callable[[Resolved], bool], name: str) -> Callable[[Resolved], Any]:
    """Return a function that returns the value of a parameter if `is_used` holds, else _UNUSED."""
    return lambda resolved: resolved.config.value_of(name) if is_used(resolved) else _UNUSED


def _is_sparse(resolved: Resolved) -> bool:
    return any(ATTENTION_FACTS[kind].is_in_blocks for kind in resolved.derived.attention_types)


def _sparsity(resolved: Resolved) -> SparsityConfig:
    return resolved.config.attention.sparsity_config


def _norm(resolved: Resolved) -> str:
    norm = resolved.config.model.norm
    return "layernorm" if norm == "apexlayernorm" else norm


def _window(resolved: Resolved) -> Any:
    """Return the window of global layers; null if every sample fits into it."""
    return sliding_window(resolved.config) if _has(resolved, "global") else _UNUSED


def _scaling(name: str) -> Callable[[Resolved], Any]:
    """Return a function that returns a setting of scaled rotary frequencies if it has an effect."""

    def value(resolved: Resolved) -> Any:
        config = resolved.config
        scaling = config.attention.rotary_scaling.in_use(config.model.max_position_embeddings)
        return scaling.get(name, _UNUSED) if config.attention.pos_emb == "rotary" else _UNUSED

    return value


def _gelu(resolved: Resolved) -> Any:
    model = resolved.config.model
    if model.activation != "gelu":
        return _UNUSED
    return "tanh form" if model.openai_gelu or model.bias_gelu_fusion else "erf form"


def _attention_types(resolved: Resolved) -> list[list[Any]]:
    return [[kind, len(list(layers))] for kind, layers in groupby(resolved.derived.attention_types)]


def _weight_owners(resolved: Resolved) -> list[int] | None:
    owners = resolved.derived.weight_owners
    return None if owners is None else list(owners)


def _global_blocks(resolved: Resolved) -> Any:
    types = resolved.derived.attention_types
    if not any("global_block_indices" in ATTENTION_FACTS[kind].settings for kind in types):
        return _UNUSED
    return [list(stretch) for stretch in _sparsity(resolved).global_ranges]


def _seed_of_blocks(resolved: Resolved) -> Any:
    can_draw = any(
        "num_random_blocks" in ATTENTION_FACTS[kind].settings for kind in resolved.derived.attention_types
    )
    draws = can_draw and _sparsity(resolved).num_random_blocks > 0
    return resolved.config.training.seed if draws else _UNUSED


def _is_decoupled(resolved: Resolved) -> Any:
    """Return True if Adam uses decoupled weight decay; _UNUSED without weight decay."""
    optimizer = resolved.config.optimizer.optimizer
    decoupled = {"adamw": True, "cpu_torch_adam": False}
    decoupled |= dict.fromkeys(("adam", "cpu_adam"), optimizer.params.adam_w_mode)
    return decoupled.get(optimizer.kind, _UNUSED) if optimizer.params.weight_decay else _UNUSED


def _of_the_scheduler(name: str) -> Callable[[Resolved], Any]:
    """Return a function that returns an argument of the scheduler, with null replaced by its meaning."""

    def value(resolved: Resolved) -> Any:
        if not is_in_use(f"scheduler.params.{name}", resolved.config):
            return _UNUSED
        curve = learning_rate_curve(resolved.config, decay_iterations=resolved.derived.lr_decay_iters)
        return getattr(curve, name)

    return value


def _has_own_curve(resolved: Resolved) -> bool:
    return resolved.config.optimizer.scheduler.type is None


_SPARSITY = "sparsity_config"
# Parameters whose value in effect differs from the given one.
_DECIDES: dict[str, Callable[[Resolved], Any]] = {
    "lora_target_modules": lambda resolved: adapted_matrices(resolved.config) or _UNUSED,
    "amp.enabled": lambda resolved: resolved.derived.autocast is not None,
    "num_kv_heads": lambda resolved: (
        resolved.config.model.num_kv_heads or resolved.config.model.num_attention_heads
    ),
    "max_position_embeddings": _where(
        lambda resolved: resolved.config.attention.pos_emb == "learned", "max_position_embeddings"
    ),
    "norm": _norm,
    "use_bias_in_qkv": lambda resolved: has_qkv_bias(resolved.config),
    "rotary_scaling.original_max_position_embeddings": _scaling("original_max_position_embeddings"),
    "rotary_scaling.attention_factor": _scaling("attention_factor"),
    "openai_gelu": _by_another,
    "bias_gelu_fusion": _by_another,
    "mlp_width": lambda resolved: resolved.derived.mlp_width,
    "intermediate_size": _by_another,
    "expansion_factor": _by_another,
    "mlp_multiple_of": _by_another,
    _WINDOW: _window,
    "num_unique_layers": _weight_owners,
    "param_sharing_style": _by_another,
    "make_vocab_size_divisible_by": _by_another,
    "vocab_file": _by_another,
    "merge_file": _by_another,
    "attention_config": _attention_types,
    # A bias on attention scores is multiplied by the layer number; without one, the results are the same.
    "apply_query_key_layer_scaling": _where(
        lambda resolved: resolved.config.attention.pos_emb in BIASED_SCORES,
        "apply_query_key_layer_scaling",
    ),
    f"{_SPARSITY}.block": _where(_is_sparse, f"{_SPARSITY}.block"),
    f"{_SPARSITY}.different_layout_per_head": _where(
        lambda resolved: any(map(_sparsity(resolved).can_differ_per_head, resolved.derived.attention_types)),
        f"{_SPARSITY}.different_layout_per_head",
    ),
    f"{_SPARSITY}.num_local_blocks": _where(
        lambda resolved: _has(resolved, "sparse_fixed"), f"{_SPARSITY}.num_local_blocks"
    ),
    f"{_SPARSITY}.num_sliding_window_blocks": _where(
        lambda resolved: _has(resolved, "bigbird", "bslongformer"), f"{_SPARSITY}.num_sliding_window_blocks"
    ),
    f"{_SPARSITY}.global_block_indices": _global_blocks,
    f"{_SPARSITY}.global_block_end_indices": _by_another,
    "precision": lambda resolved: resolved.derived.precision,
    "fp16.enabled": _by_another,
    "bf16.enabled": _by_another,
    "optimizer.type": lambda resolved: resolved.config.optimizer.optimizer.kind,
    "optimizer.params.adam_w_mode": _is_decoupled,
    "weight_decay": _by_another,
    "optimizer.params.lr": _where(
        lambda resolved: peak_instead_of_lr(resolved.config) is None, "optimizer.params.lr"
    ),
    **{f"scheduler.params.{name}": _of_the_scheduler(name) for name in SchedulerParams.model_fields},
    "lr_decay_iters": lambda resolved: (
        resolved.derived.lr_decay_iters if uses_decay_iterations(resolved.config) else _UNUSED
    ),
    "lr_decay_fraction": _by_another,
    "lr_wsd_decay_fraction": _by_another,
    "lr_wsd_decay_iters": lambda resolved: (
        final_decay_iterations(resolved.config, decay_iterations=resolved.derived.lr_decay_iters)
        if is_in_use("lr_wsd_decay_iters", resolved.config)
        else _UNUSED
    ),
    "min_lr": lambda resolved: minimum_rate(resolved.config) if _has_own_curve(resolved) else _UNUSED,
    "decay_lr_to": _by_another,
    "warmup": lambda resolved: (
        warmup_fraction(resolved.config, decay_iterations=resolved.derived.lr_decay_iters)
        if _has_own_curve(resolved)
        else _UNUSED
    ),
    "warmup_iters": _by_another,
    "train_batch_size": lambda resolved: resolved.derived.train_batch_size,
    "train_epochs": _by_another,
    "train_micro_batch_size_per_gpu": _by_another,
    "gradient_accumulation_steps": _by_another,
}
# Blocks that are used or unused as a whole; the batch size of elasticity is compared as train_batch_size.
_IN_USE: dict[str, Callable[[Resolved], bool]] = {
    "fp16": lambda resolved: resolved.derived.precision == "fp16",
    "amp": lambda resolved: resolved.derived.autocast is not None,
    "elasticity": lambda resolved: False,
}
# Values determined by several parameters together, or by one parameter outside its own class.
_TOGETHER: dict[str, tuple[Resume, Callable[[Resolved], Any]]] = {
    "openai_gelu, bias_gelu_fusion": ("model", _gelu),
    _LOCAL: (
        "model",
        lambda resolved: _sparsity(resolved).local_attention_blocks if _has(resolved, "local") else _UNUSED,
    ),
    "seed (of the random blocks of sparse layers)": ("model", _seed_of_blocks),
    "seq_length (of gmlp and amlp layers)": (
        "model",
        _where(lambda resolved: _has(resolved, *GMLP_TYPES), "seq_length"),
    ),
}
