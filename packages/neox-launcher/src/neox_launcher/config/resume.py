"""What differs between a checkpoint's configuration and that of the run that resumes from it.

Every parameter declares whether a change of it makes another model, another training, or nothing. What is
compared are the values in effect: null as what it stands for, parameters that decide something together as
what they decide, and nothing that the other settings leave unused.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

from pydantic import ValidationError

from neox_launcher.config.parameter import Resume, Section, entry_section, inner_section, resume_of
from neox_launcher.config.problems import in_words
from neox_launcher.config.resolve import Resolved, resolve
from neox_launcher.config.schema import NeoXConfig, all_parameters, section_of, sections
from neox_launcher.config.sections.attention import SparsityConfig
from neox_launcher.config.unused import is_in_use
from neox_launcher.errors import ConfigError

__all__ = [
    "IN_EFFECT",
    "LEARNING_RATE",
    "SAMPLES_PER_ITERATION",
    "Change",
    "Changes",
    "compare",
    "flat_values",
    "in_effect",
]

# Recorded in a checkpoint in addition to the parameters.
SAMPLES_PER_ITERATION = "samples_per_iteration"
IN_EFFECT = "in_effect"

# A checkpoint holds the learning-rate curve itself, and the user chooses which of two counts.
LEARNING_RATE = ("optimizer.params.lr", "lr_decay_style", "lr_decay_iters", "min_lr", "warmup")

# Where one of these is switched on or off, the optimizer's states mean something else or are missing.
_KINDS_OF_STATES = (
    "optimizer.params.adam_w_mode",
    "optimizer.params.bias_correction",
    "optimizer.params.centered",
    "optimizer.params.decoupled_weight_decay",
    "optimizer.params.momentum",
)
_UNUSED: Any = object()
_CLASSES: tuple[Resume, ...] = ("model", "training")
_LOCAL = "sparsity_config.num_local_blocks, sparsity_config.num_sliding_window_blocks (of local layers)"


@dataclass(frozen=True, slots=True)
class Change:
    """A value that differs.

    Args:
        label: the parameter, or those that decide it together.
        there: the value in effect when the checkpoint was written.
        here: the value in effect now.
    """

    label: str
    there: Any
    here: Any

    @property
    def name(self) -> str:
        """The parameter as the messages write it."""
        return self.label.replace("_", "-")

    @property
    def changes_states(self) -> bool:
        """Whether the optimizer cannot continue from the states that the checkpoint holds."""
        return self.label in _KINDS_OF_STATES and bool(self.there) != bool(self.here)

    def __str__(self) -> str:
        return f"{self.name}: {in_words(self.there)} there, {in_words(self.here)} here"


@dataclass(frozen=True, slots=True)
class Changes:
    """Everything that differs and is not free to differ.

    Args:
        model: changes of the model.
        training: changes of the training.
        unknown: why nothing could be compared; None where it could.
    """

    model: tuple[Change, ...] = ()
    training: tuple[Change, ...] = ()
    unknown: str | None = None


def flat_values(config: NeoXConfig) -> dict[str, Any]:
    """The configuration as users write it: parameter name to plain value."""
    dumped = config.model_dump(mode="json").values()
    return {name: value for section in dumped for name, value in section.items()}


def in_effect(resolved: Resolved, *, tokenizer: Mapping[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """The values that decide the model and the training: class to label to plain value.

    Args:
        resolved: the configuration.
        tokenizer: values that follow from the tokenizer's files, by the parameter that they belong to.
    """
    found: dict[str, dict[str, Any]] = {resume: {} for resume in _CLASSES}
    for name, resume, written in _leaves(resolved.config):
        if resume in found:
            found[resume][name] = _value(name, written, resolved)
    for label, (resume, decide) in _TOGETHER.items():
        found[resume][label] = decide(resolved)
    found["model"] |= tokenizer or {}
    return {
        resume: {label: value for label, value in values.items() if value is not _UNUSED}
        for resume, values in found.items()
    }


def compare(there: Mapping[str, Any], here: Mapping[str, Any], *, devices: int) -> Changes:
    """What differs between two runs.

    What only one of them has is not a change by itself: the other settings leave it unused in the other one,
    and they are compared, too. A parameter that the checkpoint's version did not have counts as its default.

    Args:
        there: parameters of the run that wrote the checkpoint, with IN_EFFECT where it recorded that.
        here: those of this run.
        devices: of the run that wrote the checkpoint.
    """
    try:
        values = there[IN_EFFECT] if IN_EFFECT in there else _reconstructed(there, devices)
    except ConfigError as error:
        return Changes(unknown=str(error))
    model, training = (tuple(_differing(resume, values, there, here)) for resume in _CLASSES)
    return Changes(model=model, training=training)


def _differing(
    resume: Resume, values: Mapping[str, Any], there: Mapping[str, Any], here: Mapping[str, Any]
) -> Iterator[Change]:
    ones, others = values.get(resume, {}), here.get(IN_EFFECT, {}).get(resume, {})
    for label in dict.fromkeys((*others, *ones)):
        one = ones[label] if label in ones else _absent(label, there)
        other = others[label] if label in others else _absent(label, here)
        if _UNUSED not in (one, other) and one != other:
            yield Change(label, one, other)


def _absent(label: str, recorded: Mapping[str, Any]) -> Any:
    """The value of what a run did not record as in effect."""
    found: Any = recorded
    for part in label.split("."):
        found = found.get(part, _UNUSED) if isinstance(found, Mapping) else _UNUSED
    if found is not _UNUSED or label in _TOGETHER:
        return _UNUSED
    # Arguments and groups that the user named are absent where they were not given.
    default = _defaults().get(label)
    return default if label not in _defaults() or default is not None else _UNUSED


@cache
def _defaults() -> dict[str, Any]:
    return {parameter.name: parameter.default for parameter in all_parameters() if not parameter.is_block}


def _reconstructed(recorded: Mapping[str, Any], devices: int) -> dict[str, dict[str, Any]]:
    """The values in effect of a run that did not record them, from its parameters.

    Raises:
        ConfigError: they are not a configuration of this version.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    known = {name for kind in sections().values() for name in kind.model_fields}
    for name in known & recorded.keys():
        values[section_of(name)][name] = recorded[name]
    try:
        found = in_effect(resolve(NeoXConfig.from_sections(values), devices=devices))
    except ValidationError as error:
        raise ConfigError(f"{error.error_count()} of its parameters are not known here") from error
    # Which of two parameters was given is not recorded.
    found["model"].pop(_LOCAL, None)
    return found


def _leaves(config: NeoXConfig) -> Iterator[tuple[str, Resume | None, Any]]:
    """Every parameter with what a change of it means and its plain value; secrets are left out."""
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
    """A parameter's value in effect, or _UNUSED."""
    if name in _DECIDES:
        return _DECIDES[name](resolved)
    block = name.partition(".")[0]
    is_used = _IN_USE[block](resolved) if block in _IN_USE else is_in_use(name, resolved.config)
    return written if is_used else _UNUSED


def _by_another(resolved: Resolved) -> Any:
    """Compared by another parameter, or by the tokenizer's files."""
    return _UNUSED


def _has(resolved: Resolved, *kinds: str) -> bool:
    return not set(kinds).isdisjoint(resolved.derived.attention_types)


def _where(is_used: Callable[[Resolved], bool], name: str) -> Callable[[Resolved], Any]:
    """The value of a parameter where something holds."""
    return lambda resolved: resolved.config.value_of(name) if is_used(resolved) else _UNUSED


def _is_sparse(resolved: Resolved) -> bool:
    return _has(resolved, "local", "sparse_fixed", "sparse_variable", "bslongformer", "bigbird")


def _sparsity(resolved: Resolved) -> SparsityConfig:
    return resolved.config.attention.sparsity_config


def _norm(resolved: Resolved) -> str:
    norm = resolved.config.model.norm
    return "layernorm" if norm == "apexlayernorm" else norm


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
    if not _has(resolved, "sparse_variable", "bslongformer"):
        return _UNUSED
    return [list(stretch) for stretch in _sparsity(resolved).global_ranges]


def _seed_of_blocks(resolved: Resolved) -> Any:
    draws = _has(resolved, "sparse_variable", "bigbird") and _sparsity(resolved).num_random_blocks > 0
    return resolved.config.training.seed if draws else _UNUSED


def _is_decoupled(resolved: Resolved) -> Any:
    """Whether Adam decays weights apart from the gradient; unused without decay."""
    optimizer = resolved.config.optimizer.optimizer
    decoupled = {"adamw": True, "cpu_torch_adam": False}
    decoupled |= dict.fromkeys(("adam", "cpu_adam"), optimizer.params.adam_w_mode)
    return decoupled.get(optimizer.kind, _UNUSED) if optimizer.params.weight_decay else _UNUSED


_SPARSITY = "sparsity_config"
# Parameters whose value in effect is not the one that is written.
_DECIDES: dict[str, Callable[[Resolved], Any]] = {
    "num_kv_heads": lambda resolved: (
        resolved.config.model.num_kv_heads or resolved.config.model.num_attention_heads
    ),
    "max_position_embeddings": _where(
        lambda resolved: resolved.config.attention.pos_emb == "learned", "max_position_embeddings"
    ),
    "norm": _norm,
    "openai_gelu": _by_another,
    "bias_gelu_fusion": _by_another,
    "intermediate_size": lambda resolved: resolved.derived.intermediate_size,
    "num_unique_layers": _weight_owners,
    "param_sharing_style": _by_another,
    "make_vocab_size_divisible_by": _by_another,
    "vocab_file": _by_another,
    "merge_file": _by_another,
    "attention_config": _attention_types,
    # A bias of scores counts as often as the layer's number says; elsewhere the function is the same.
    "apply_query_key_layer_scaling": _where(
        lambda resolved: resolved.config.attention.pos_emb in ("rpe", "alibi"),
        "apply_query_key_layer_scaling",
    ),
    f"{_SPARSITY}.block": _where(_is_sparse, f"{_SPARSITY}.block"),
    f"{_SPARSITY}.different_layout_per_head": _where(_is_sparse, f"{_SPARSITY}.different_layout_per_head"),
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
    "lr_decay_iters": lambda resolved: resolved.derived.lr_decay_iters,
    "train_batch_size": lambda resolved: resolved.derived.train_batch_size,
    "train_micro_batch_size_per_gpu": _by_another,
    "gradient_accumulation_steps": _by_another,
}
# Blocks that are used or not as a whole: what elasticity chooses is compared as train_batch_size.
_IN_USE: dict[str, Callable[[Resolved], bool]] = {
    "fp16": lambda resolved: resolved.derived.precision == "fp16",
    "elasticity": lambda resolved: False,
}
# What several parameters decide together, or one of them besides its own class.
_TOGETHER: dict[str, tuple[Resume, Callable[[Resolved], Any]]] = {
    "openai_gelu, bias_gelu_fusion": ("model", _gelu),
    _LOCAL: (
        "model",
        lambda resolved: _sparsity(resolved).local_attention_blocks if _has(resolved, "local") else _UNUSED,
    ),
    "seed (of the random blocks of sparse layers)": ("model", _seed_of_blocks),
    "seq_length (of gmlp and amlp layers)": (
        "model",
        _where(lambda resolved: _has(resolved, "gmlp", "amlp"), "seq_length"),
    ),
}
