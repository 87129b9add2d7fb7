"""Display of configurations as YAML with the origin of every value, and of differences between them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from neox_config.derive.implied import default_in, follows_from
from neox_config.derive.optimizer_arguments import optimizer_facts, own_arguments, refused_parameters
from neox_config.problems import Place, in_words, place_of
from neox_config.schema.config import NeoXConfig, sections
from neox_config.schema.parameter import Section, entry_section, inner_section
from neox_config.schema.paths import is_path, written_paths
from neox_config.schema.sections.optimizer import OptimizerParams
from neox_config.spec.resolve import Resolved, derived_values

__all__ = ["show_config", "show_derived", "show_difference"]

_WIDEST = 60

# A line and the origin of its value; empty for the name of a block.
_Row = tuple[str, str]

# How each derived value is computed.
_DERIVED_BY = {
    "world_size": "devices of the job",
    "hosts": "hosts of the job",
    "data_parallel_size": "world_size / (model_parallel_size x pipe_parallel_size)",
    "model_parallel_size": "model_parallel_size, at least 1",
    "pipe_parallel_size": "pipe_parallel_size, at least 1",
    "uses_pipeline": "pipe_parallel_size is at least 2, or 1 with the engine deepspeed",
    "train_batch_size": "micro-batch x accumulation x data_parallel_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu, or batch / (accumulation x data_parallel_size)",
    "accumulation": "gradient_accumulation_steps, or batch / (micro-batch x data_parallel_size), or 1",
    "precision": "precision, or the enabled block (fp16, bf16)",
    "autocast": "amp; null: matrix products in the data type of the weights",
    "attention_types": "attention_config, repeated over num_layers",
    "weight_owners": "num_unique_layers and param_sharing_style; null: no weights are shared",
    "mlp_width": "mlp_width, intermediate_size or expansion_factor, mlp_multiple_of, activation, hidden_size",
    "lr_decay_iters": "lr_decay_iters, or lr_decay_fraction x train_iters, or train_iters",
    "elastic_devices": "elasticity: numbers of devices that this train_batch_size works with",
    "backend": "distributed_backend; null: nccl with GPUs, else gloo",
}


def show_config(config: NeoXConfig, *, changed: bool = False) -> str:
    """Return every parameter, one per line, as `name: value  # origin`; the result can be loaded again.

    Args:
        config: the configuration.
        changed: return only the parameters whose value differs from the default.
    """
    rows: list[_Row] = []
    for name in sections():
        rows += _rows(getattr(config, name), _Printed(config, changed=changed))
    width = min(max(len(text) for text, _ in rows), _WIDEST)
    return "\n".join(f"{text:<{width}}  # {origin}" if origin else text for text, origin in rows)


def show_derived(resolved: Resolved) -> str:
    """Return the derived values and how they are computed, as YAML comments."""
    values = _derived(resolved)
    rows = [
        (f"# {name}: {json.dumps(value, allow_nan=False)}", _DERIVED_BY[name])
        for name, value in values.items()
    ]
    width = min(max(len(text) for text, _ in rows), _WIDEST)
    return "\n".join(f"{text:<{width}}  # from {rule}" for text, rule in rows)


def show_difference(one: Resolved, other: Resolved) -> str:
    """Return the differences between two resolved configurations, with the origin of both values."""
    ones, others = (_flat(_values_in_effect(resolved.config)) for resolved in (one, other))
    lines: list[str] = []
    for path in dict.fromkeys((*ones, *others)):
        if ones.get(path) != others.get(path):
            name = ".".join(path[1:])
            sides = ((ones.get(path), one.config), (others.get(path), other.config))
            lines += [name, *(f"  {in_words(value)}  # {_place(name, config)}" for value, config in sides)]
    derived = [_derived(resolved) for resolved in (one, other)]
    for name, value in derived[0].items():
        if name in derived[1] and value != derived[1][name]:
            texts = (in_words(value), in_words(derived[1][name]))
            lines += [f"{name} (derived)", *(f"  {text}  # from {_DERIVED_BY[name]}" for text in texts)]
    return "\n".join(lines)


def _derived(resolved: Resolved) -> dict[str, Any]:
    """Return the derived values, without those that follow from an unknown number of iterations."""
    values = derived_values(resolved)
    schedule = resolved.config.lr_schedule
    is_given = schedule.lr_decay_iters is not None and schedule.lr_decay_fraction is None
    if resolved.config.training.train_iters is None and not is_given:
        del values["lr_decay_iters"]
    return values


def _values_in_effect(config: NeoXConfig) -> dict[str, Any]:
    """Return the plain values by section, with the arguments that the optimizer uses."""
    values = config.model_dump(mode="json")
    params = values["optimizer"]["optimizer"]["params"]
    for name in refused_parameters(config):
        del params[name]
    params |= {name: _plain(value) for name, value in own_arguments(config).items()}
    return values


def _plain(value: Any) -> Any:
    """Return a value as its JSON equivalent."""
    return list(value) if isinstance(value, tuple) else value


def _flat(tree: dict[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return the values of nested dicts by path."""
    found: dict[tuple[str, ...], Any] = {}
    for name, value in tree.items():
        is_block = isinstance(value, dict) and value
        found |= _flat(value, (*path, name)) if is_block else {(*path, name): value}
    return found


def _place(name: str, config: NeoXConfig) -> str:
    by = follows_from(name, config)
    place = place_of(config.sources, name)
    return f"follows from {by}" if by else str(place) if place else "default"


@dataclass(frozen=True, slots=True)
class _Printed:
    """The block of a configuration that is printed: its names have a prefix, its lines an indentation."""

    config: NeoXConfig
    changed: bool
    prefix: str = ""
    indent: str = ""

    def inside(self, name: str) -> "_Printed":
        return replace(self, prefix=f"{self.prefix}{name}.", indent=f"{self.indent}  ")

    def leaves_out(self, name: str, value: Any, declared: FieldInfo) -> bool:
        return self.changed and value == default_in(self.config, f"{self.prefix}{name}", declared)


def _rows(section: Section, at: _Printed) -> Iterator[_Row]:
    is_of_optimizer = isinstance(section, OptimizerParams)
    own = own_arguments(at.config) if is_of_optimizer else {}
    elsewhere = {*own, *refused_parameters(at.config)} if is_of_optimizer else set()
    for name, declared in type(section).model_fields.items():
        if name in elsewhere:
            continue
        value = getattr(section, name)
        if inner_section(declared) is not None:
            inside = list(_rows(value, at.inside(name)))
            yield from [(f"{at.indent}{name}:", ""), *inside] if inside or not at.changed else []
        elif entry_section(declared) is not None and value:
            yield f"{at.indent}{name}:", ""
            yield from _entry_rows(value, at.inside(name))
        elif not at.leaves_out(name, value, declared):
            yield _row(name, value, declared, at)
    defaults = optimizer_facts(at.config).arguments if is_of_optimizer else {}
    for name, value in ((section.model_extra or {}) | own).items():
        default = _plain(defaults.get(name))
        if name not in defaults or not at.changed or _plain(value) != default:
            origin = _origin(f"{at.prefix}{name}", _plain(value), default, at.config)
            yield f"{at.indent}{name}: {_as_yaml(value)}", origin


def _entry_rows(entries: Mapping[str, Section], at: _Printed) -> Iterator[_Row]:
    for key, entry in entries.items():
        inside = list(_rows(entry, at.inside(key)))
        yield from [(f"{at.indent}{key}:", ""), *inside] if inside else [(f"{at.indent}{key}: {{}}", "")]


def _row(name: str, value: Any, declared: FieldInfo, at: _Printed) -> _Row:
    path = f"{at.prefix}{name}"
    if isinstance(value, SecretStr):
        return f"{at.indent}{name}: null", f"secret, not shown; {at.config.sources[path]}"
    default = declared.get_default(call_default_factory=True)
    written = written_paths(value) if is_path(declared) else value
    return f"{at.indent}{name}: {_as_yaml(written)}", _origin(path, value, default, at.config)


def _as_yaml(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _origin(name: str, value: Any, default: Any, config: NeoXConfig) -> str:
    by = follows_from(name, config)
    if by is not None and value != default:
        return f"follows from {by}: {in_words(config.value_of(by))}"
    place: Place | None = config.sources.get(name)
    if place is not None:
        return str(place)
    inside = [source for given, source in config.sources.items() if given.startswith(f"{name}.")]
    if inside:
        return str(inside[0])
    return "default" if value == default else "follows from other values"
