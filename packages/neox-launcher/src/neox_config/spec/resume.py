"""Compare the configuration of a checkpoint with that of the run that resumes from it.

Every parameter declares if a change affects the model, training, or neither. The values in effect are
compared: null is replaced by its meaning, parameters that act together are compared by their result, and
values that have no effect under the other settings are skipped.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from neox_config.derive.attention_layers import has_qkv_bias, of_kind, sliding_window, types_in
from neox_config.derive.experts import expert_layers, expert_scores, has_experts, inner_widths
from neox_config.derive.learning_rate import (
    decays_of_wsd,
    learning_rate_curve,
    minimum_rate,
    peak_instead_of_lr,
    uses_decay_iterations,
    warmup_fraction,
)
from neox_config.derive.optimizer_arguments import optimizer_facts, own_arguments, refused_parameters
from neox_config.derive.unused import is_in_use
from neox_config.errors import ConfigError
from neox_config.facts.attention import ATTENTION_FACTS, BIASED_SCORES, attention_type
from neox_config.facts.optimizers import ARGUMENT_LIMITS, OPTIMIZER_FACTS
from neox_config.problems import Problem, in_words
from neox_config.schema.config import NeoXConfig, all_parameters, sections
from neox_config.schema.parameter import Resume, Section, entry_section, inner_section, resume_of
from neox_config.schema.sections.attention import RotaryScaling
from neox_config.schema.sections.optimizer import OptimizerParams, Scheduler, SchedulerParams
from neox_config.spec.model import Attention, Blocks, Learned, SpatialMLP, Vocabulary
from neox_config.spec.recorded import FORMER_WIDTH, contents_of, latest_checkpoint, recorded_sections
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
    "recorded_values",
    "with_recorded_form",
]

# Recorded in a checkpoint in addition to the parameters.
SAMPLES_PER_ITERATION = "samples_per_iteration"
IN_EFFECT = "in_effect"

# A checkpoint contains the learning rate schedule itself, and the user chooses which of the two is used.
LEARNING_RATE = (
    *("optimizer.params.lr", "lr_decay_style", "lr_decay_iters", "min_lr", "warmup"),
    *("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decays"),
    *(parameter.name for parameter in Scheduler.parameters("scheduler.", "training")),
)

_ARGUMENTS = "optimizer.params."
# Null means every earlier token. A window has an effect only in samples that are longer.
_WINDOW = "sliding_window_width"
_UNUSED: Any = object()
_CLASSES: tuple[Resume, ...] = ("model", "training")
_SPARSITY, _SCHEDULER = "sparsity_config.", "scheduler.params."
# Named after several parameters, or after one outside its own class.
_GELU = "openai_gelu, bias_gelu_fusion"
_LOCAL = "sparsity_config.num_local_blocks, sparsity_config.num_sliding_window_blocks (of local layers)"
_SEED = "seed (of the random blocks of sparse layers)"
_LENGTH = "seq_length (of gmlp and amlp layers)"
# Compared through another parameter, or through the tokenizer's files.
_BY_ANOTHER = frozenset(
    """
    openai_gelu bias_gelu_fusion intermediate_size expansion_factor mlp_multiple_of param_sharing_style
    make_vocab_size_divisible_by vocab_file merge_file sparsity_config.global_block_end_indices fp16.enabled
    bf16.enabled weight_decay lr_decay_fraction lr_wsd_decay_fraction decay_lr_to warmup_iters train_epochs
    train_micro_batch_size_per_gpu gradient_accumulation_steps moe_expert_interval
    """.split()
)
# Null stands for a value that follows from others.
_FOLLOWS = frozenset(
    """
    vocab_file attention_config lr_decay_iters lr_wsd_decay_iters max_position_embeddings mlp_width
    num_kv_heads num_unique_layers optimizer.params.lr precision rotary_scaling.attention_factor
    rotary_scaling.original_max_position_embeddings train_batch_size use_bias_in_qkv moe_layers
    moe_expert_width moe_scores
    """.split()
) | {f"{_SCHEDULER}{name}" for name in SchedulerParams.model_fields}


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
        training: changes of training.
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
    """Return the values that determine the model and training: class -> label -> plain value.

    Args:
        resolved: the configuration.
        tokenizer: values that follow from the tokenizer's files, by parameter.
    """
    found: dict[str, dict[str, Any]] = {resume: {} for resume in _CLASSES}
    for name, resume, written in _leaves(resolved.config):
        if resume in found:
            found[resume][name] = written if _is_used(name, resolved) else _UNUSED
    found["model"] |= _of_model(resolved)
    found["training"] |= _of_training(resolved) | _optimizer_arguments(resolved.config)
    found["model"] |= tokenizer or {}
    return {
        resume: {label: value for label, value in values.items() if value is not _UNUSED}
        for resume, values in found.items()
    }


def recorded_values(resolved: Resolved, *, fingerprint: str, vocab_size: int) -> dict[str, Any]:
    """Return the values of a run that its checkpoints record and a later load compares.

    Args:
        resolved: the configuration.
        fingerprint: SHA-256 of the tokenizer.
        vocab_size: entries of the tokenizer's vocabulary.
    """
    files = {
        "vocab_file": f"sha256 {fingerprint[:16]}",
        "make_vocab_size_divisible_by": f"{resolved.model.embedding.entries(vocab_size):,} entries",
    }
    return flat_values(resolved.config) | {
        SAMPLES_PER_ITERATION: resolved.run.batch.whole,
        IN_EFFECT: in_effect(resolved, tokenizer=files),
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


def with_recorded_form(config: NeoXConfig) -> NeoXConfig:
    """Return the configuration of a run with the form of the optimizer that its checkpoint records.

    The form is the arguments whose default is not what earlier versions computed (`OptimizerFacts.former`). A
    training continues with its own form unless the configuration sets another one; a note states it.

    Args:
        config: loaded configuration.
    """
    optimizer, section, facts = config.optimizer.optimizer, config.checkpoint, optimizer_facts(config)
    checkpoint = latest_checkpoint(Path(section.load)) if facts.former and section.load else None
    if checkpoint is None or section.finetune:
        return config
    form = _recorded_form(contents_of(checkpoint).get("config", {}), optimizer.kind)
    missing = form.keys() - optimizer.params.given().keys()
    kept = {name: form[name] for name in sorted(missing) if form[name] != facts.arguments[name]}
    notes = [
        Problem(
            f"{_ARGUMENTS}{name}",
            f"is that of {checkpoint.name}, which this run continues",
            f"set it to this value, or to {facts.arguments[name]} to train on with that",
            value=in_words(value),
        )
        for name, value in kept.items()
    ]
    changed = optimizer.replaced(params=optimizer.params.replaced(**kept))
    return config.model_copy(update={"optimizer": config.optimizer.replaced(optimizer=changed)}).with_origin(
        sources=config.sources, notices=(*config.notices, *notes), files=config.files
    )


def _recorded_form(recorded: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the valid values of the optimizer's form; empty if they belong to another optimizer or none."""
    try:
        if optimizer_kind(recorded) != kind:
            return {}
        values = recorded_effects(recorded).get("training", {})
    except (ConfigError, AttributeError):
        return {}  # Loading reports it.
    form = OPTIMIZER_FACTS[kind].former
    found = {name: values.get(f"{_ARGUMENTS}{name}", former) for name, former in form.items()}
    return {name: value for name, value in found.items() if ARGUMENT_LIMITS[name].holds(value)}


def _renamed(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return values in effect under today's names: mlp_width was recorded as intermediate_size before."""
    model = dict(values.get("model", {}))
    if "mlp_width" not in model and FORMER_WIDTH in model:
        model["mlp_width"] = model.pop(FORMER_WIDTH)
    return {**values, "model": model}


def _differing(
    resume: Resume, values: Mapping[str, Any], there: Mapping[str, Any], here: Mapping[str, Any]
) -> Iterator[Change]:
    ones, others = values.get(resume, {}), here.get(IN_EFFECT, {}).get(resume, {})
    decisive = _deciding_states(here)
    for label in dict.fromkeys((*others, *ones)):
        if label.endswith(_WINDOW) and all(
            _given(name, there) == _given(name, here) for name in (_WINDOW, label)
        ):
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
    if _given(label, recorded) is not _UNUSED or label in (_GELU, _LOCAL, _SEED, _LENGTH):
        return _UNUSED
    if label.startswith(_ARGUMENTS):
        facts = OPTIMIZER_FACTS.get(optimizer_kind(recorded))
        own = {} if facts is None else {**facts.arguments, **facts.former}
        # An argument that the optimizer does not take has no default.
        return _plain(own.get(label.removeprefix(_ARGUMENTS), _defaults().get(label, _UNUSED)))
    # Groups named by the user are absent if they were not given.
    default = _defaults().get(label)
    return _UNUSED if default is None and label in _FOLLOWS else default


def _given(label: str, recorded: Mapping[str, Any]) -> Any:
    """Return the recorded value of a parameter, whether it has an effect or not."""
    found: Any = recorded
    for part in label.split("."):
        found = found.get(part, _UNUSED) if isinstance(found, Mapping) else _UNUSED
    return found


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
    try:
        config = NeoXConfig.from_sections(recorded_sections(recorded, sections()))
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
    given = config.optimizer.optimizer.params.given()
    for name, former in optimizer_facts(config).former.items():
        found["training"][f"{_ARGUMENTS}{name}"] = given.get(name, former)
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


def _is_used(name: str, resolved: Resolved) -> bool:
    block = name.partition(".")[0]
    # Blocks that are used as a whole; the batch size of elasticity is compared as train_batch_size.
    is_used = {
        "fp16": resolved.run.precision.weights == "fp16",
        "amp": resolved.run.precision.autocast is not None,
        "elasticity": False,
        # Compared by what they give.
        "attention_kinds": False,
    }
    return name not in _BY_ANOTHER and is_used.get(block, True) and is_in_use(name, resolved.config)


def _plain(value: Any) -> Any:
    """Return a value as its JSON equivalent."""
    return list(value) if isinstance(value, tuple) else value


def _optimizer_arguments(config: NeoXConfig) -> dict[str, Any]:
    """Return the arguments of the optimizer whose names or defaults differ from the declared parameters."""
    values = dict.fromkeys(refused_parameters(config), _UNUSED) | own_arguments(config)
    return {f"{_ARGUMENTS}{name}": _plain(value) for name, value in values.items()}


def _of_model(resolved: Resolved) -> dict[str, Any]:
    """Return the values of the model that are not as given, and those of several parameters together."""
    config, model, widths = resolved.config, resolved.model, inner_widths(resolved.config)
    section, attention, sparsity = config.model, config.attention, config.attention.sparsity_config
    kinds = {layer.mixer.kind: layer.mixer for layer in model.layers}
    used = {name for kind in kinds for name in ATTENTION_FACTS[attention_type(kind)].settings}
    added, owners = model.embedding.position, [layer.owner for layer in model.layers]
    activation = getattr(model.layers[0].channel or model.layers[0].mixer, "activation", "")
    has_own_rotary, scaling = kinds.keys() <= attention.attention_kinds.keys(), {}
    if attention.pos_emb == "rotary" and not has_own_rotary:
        scaling = attention.rotary_scaling.in_use(section.max_position_embeddings)
    heads = next((each for each in kinds.values() if isinstance(each, Attention)), None)
    blocks = [
        pattern for each in kinds.values() if isinstance(pattern := getattr(each, "pattern", None), Blocks)
    ]
    return {
        "lora_target_modules": (list(model.adapters.matrices) if model.adapters else None) or _UNUSED,
        "num_kv_heads": section.num_kv_heads or section.num_attention_heads,
        # Null if they are the usual ones.
        "head_dim": _UNUSED
        if heads is None
        else heads.head_width
        if heads.query_width != model.width
        else None,
        "attention_scale": _UNUSED if heads is None else heads.scale,
        "max_position_embeddings": added.count if isinstance(added, Learned) else _UNUSED,
        "norm": model.norm.kind,
        "use_bias_in_qkv": has_qkv_bias(config),
        **{
            f"rotary_scaling.{name}": scaling.get(name, _UNUSED)
            for name in RotaryScaling.model_fields
            if has_own_rotary or name in ("original_max_position_embeddings", "attention_factor")
        },
        **({"rotary_emb_base": _UNUSED} if has_own_rotary else {}),
        **{
            f"attention_kinds.{kind}.{name}": value
            for kind in kinds
            if kind in attention.attention_kinds
            for name, value in _of_kind(of_kind(config, kind)).items()
        },
        "mlp_width": widths.get("mlp_width", _UNUSED),
        "moe_expert_width": widths.get("moe_expert_width", _UNUSED),
        "moe_layers": sorted(expert_layers(config)) or _UNUSED,
        "moe_scores": expert_scores(config) if has_experts(config) else _UNUSED,
        "embedding_scale": model.embedding.scale,
        "logit_scale": model.head.scale if isinstance(model.head, Vocabulary) else _UNUSED,
        # Null if every sample fits into it.
        _WINDOW: sliding_window(config) if "global" in kinds else _UNUSED,
        "num_unique_layers": None if None in owners else owners,
        "attention_config": [[kind, len(list(layers))] for kind, layers in groupby(model.kinds)],
        # A bias on attention scores is multiplied by the layer number; without one, the results are the same.
        "apply_query_key_layer_scaling": (
            attention.apply_query_key_layer_scaling if attention.pos_emb in BIASED_SCORES else _UNUSED
        ),
        f"{_SPARSITY}block": sparsity.block if used else _UNUSED,
        f"{_SPARSITY}different_layout_per_head": (
            sparsity.different_layout_per_head
            if any(map(sparsity.can_differ_per_head, types_in(config)))
            else _UNUSED
        ),
        f"{_SPARSITY}num_local_blocks": sparsity.num_local_blocks if "sparse_fixed" in kinds else _UNUSED,
        f"{_SPARSITY}num_sliding_window_blocks": (
            sparsity.num_sliding_window_blocks if kinds.keys() & {"bigbird", "bslongformer"} else _UNUSED
        ),
        f"{_SPARSITY}global_block_indices": (
            [list(stretch) for stretch in sparsity.global_ranges]
            if "global_block_indices" in used
            else _UNUSED
        ),
        _GELU: {"gelu": "erf form", "gelu_tanh": "tanh form"}.get(activation, _UNUSED),
        _LOCAL: sparsity.local_attention_blocks if "local" in kinds else _UNUSED,
        _SEED: next((each.seed for each in blocks if each.random_blocks), _UNUSED),
        _LENGTH: next((each.length for each in kinds.values() if isinstance(each, SpatialMLP)), _UNUSED),
    }


def _of_kind(config: NeoXConfig) -> dict[str, Any]:
    """Return the values of a kind of attention, given the configuration for it."""
    attention = config.attention
    found: dict[str, Any] = {_WINDOW: sliding_window(config), "pos_emb": attention.pos_emb}
    if attention.pos_emb == "rotary":
        scaling = attention.rotary_scaling.in_use(config.model.max_position_embeddings)
        found["rotary_emb_base"] = attention.rotary_emb_base
        found |= {
            f"rotary_scaling.{name}": _plain(value) for name, value in ({"type": "none"} | scaling).items()
        }
    return found


def _of_training(resolved: Resolved) -> dict[str, Any]:
    """Return the values of training that are not as given."""
    config, precision, update = resolved.config, resolved.run.precision, resolved.update
    optimizer, has_own_curve = config.optimizer.optimizer, config.optimizer.scheduler.type is None
    decoupled = {"adamw": True, "cpu_torch_adam": False}
    decoupled |= dict.fromkeys(("adam", "cpu_adam"), optimizer.params.adam_w_mode)
    found = {
        "amp.enabled": precision.autocast is not None,
        "precision": precision.weights,
        "optimizer.type": optimizer.kind,
        # Without weight decay, both kinds are the same.
        "optimizer.params.adam_w_mode": (
            decoupled.get(optimizer.kind, _UNUSED) if optimizer.params.weight_decay else _UNUSED
        ),
        "optimizer.params.lr": optimizer.params.lr if peak_instead_of_lr(config) is None else _UNUSED,
        "min_lr": minimum_rate(config) if has_own_curve else _UNUSED,
        "train_batch_size": resolved.run.batch.whole,
    }
    found |= dict.fromkeys(("lr_decay_iters", "lr_wsd_decay_iters", "warmup"), _UNUSED)
    found |= dict.fromkeys((f"{_SCHEDULER}{name}" for name in SchedulerParams.model_fields), _UNUSED)
    # Passes over data that was not read: what depends on their iterations cannot be compared.
    return found if update.decay_iterations is None else found | _of_decay(config, update.decay_iterations)


def _of_decay(config: NeoXConfig, iterations: int) -> dict[str, Any]:
    """Return the values in use that depend on the iterations over which the learning rate decays."""
    found: dict[str, Any] = {}
    if uses_decay_iterations(config):
        found["lr_decay_iters"] = iterations
    if config.optimizer.scheduler.type is None:
        found["warmup"] = warmup_fraction(config, decay_iterations=iterations)
    if is_in_use("lr_wsd_decay_iters", config):
        found["lr_wsd_decay_iters"] = decays_of_wsd(config, decay_iterations=iterations)[-1][1]
    if used := [name for name in SchedulerParams.model_fields if is_in_use(f"{_SCHEDULER}{name}", config)]:
        curve = learning_rate_curve(config, decay_iterations=iterations)
        found |= {f"{_SCHEDULER}{name}": getattr(curve, name) for name in used}
    return found
