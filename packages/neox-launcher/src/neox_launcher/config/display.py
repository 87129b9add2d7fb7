"""A configuration as YAML that can be loaded again, with the origin of every value beside it; differences."""

import json
from collections.abc import Iterator
from typing import Any

from pydantic import SecretStr

from neox_launcher.config.implied import follows_from
from neox_launcher.config.parameter import Section, entry_section, inner_section
from neox_launcher.config.problems import Place, in_words, place_of
from neox_launcher.config.resolve import Resolved
from neox_launcher.config.schema import NeoXConfig, sections

__all__ = ["show_config", "show_derived", "show_difference"]

_WIDEST = 60

# How each derived value is found.
_DERIVED_BY = {
    "world_size": "devices of the job",
    "hosts": "hosts of the job",
    "data_parallel_size": "world_size / (model_parallel_size x pipe_parallel_size)",
    "model_parallel_size": "model_parallel_size, at least 1",
    "pipe_parallel_size": "pipe_parallel_size, at least 1",
    "uses_pipeline": "pipe_parallel_size is at least 1",
    "train_batch_size": "micro-batch x accumulation x data_parallel_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu, or batch / (accumulation x data_parallel_size)",
    "accumulation": "gradient_accumulation_steps, or batch / (micro-batch x data_parallel_size), or 1",
    "precision": "precision, or the block (fp16, bf16) that is enabled",
    "attention_types": "attention_config, spread over num_layers",
    "weight_owners": "num_unique_layers, dealt by param_sharing_style; null: none are shared",
    "intermediate_size": "intermediate_size, or 4 x hidden_size; 8/3 x hidden_size when gated",
    "lr_decay_iters": "lr_decay_iters, or train_iters",
    "elastic_devices": "elasticity: numbers of devices that share this train_batch_size",
    "backend": "distributed_backend; null: nccl with GPUs, else gloo",
}


def show_config(config: NeoXConfig) -> str:
    """Every parameter, one per line, as `name: value  # origin`."""
    rows: list[tuple[str, str]] = []
    for name in sections():
        rows += _rows(getattr(config, name), "", 0, config)
    width = min(max(len(text) for text, _ in rows), _WIDEST)
    return "\n".join(f"{text:<{width}}  # {origin}" if origin else text for text, origin in rows)


def show_derived(resolved: Resolved) -> str:
    """What follows on so many devices and by which rule, as comments."""
    values = resolved.derived.model_dump(mode="json")
    rows = [(f"# {name}: {json.dumps(value)}", _DERIVED_BY[name]) for name, value in values.items()]
    width = min(max(len(text) for text, _ in rows), _WIDEST)
    return "\n".join(f"{text:<{width}}  # from {rule}" for text, rule in rows)


def show_difference(one: Resolved, other: Resolved) -> str:
    """What differs between two resolved configurations, with the origin of either value; or nothing."""
    ones, others = (_flat(resolved.config.model_dump(mode="json")) for resolved in (one, other))
    lines: list[str] = []
    for path in dict.fromkeys((*ones, *others)):
        if ones.get(path) != others.get(path):
            name = ".".join(path[1:])
            sides = ((ones.get(path), one.config), (others.get(path), other.config))
            lines += [name, *(f"  {in_words(value)}  # {_place(name, config)}" for value, config in sides)]
    derived = [resolved.derived.model_dump(mode="json") for resolved in (one, other)]
    for name, value in derived[0].items():
        if value != derived[1][name]:
            texts = (in_words(value), in_words(derived[1][name]))
            lines += [f"{name} (derived)", *(f"  {text}  # from {_DERIVED_BY[name]}" for text in texts)]
    return "\n".join(lines)


def _flat(tree: dict[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """The values of nested dicts by their paths."""
    found: dict[tuple[str, ...], Any] = {}
    for name, value in tree.items():
        is_block = isinstance(value, dict) and value
        found |= _flat(value, (*path, name)) if is_block else {(*path, name): value}
    return found


def _place(name: str, config: NeoXConfig) -> str:
    by = follows_from(name, config)
    place = place_of(config.sources, name)
    return f"follows from {by}" if by else str(place) if place else "default"


def _rows(section: Section, prefix: str, depth: int, config: NeoXConfig) -> Iterator[tuple[str, str]]:
    indent = "  " * depth
    for name, declared in type(section).model_fields.items():
        value = getattr(section, name)
        if inner_section(declared) is not None:
            yield f"{indent}{name}:", ""
            yield from _rows(value, f"{prefix}{name}.", depth + 1, config)
        elif entry_section(declared) is not None and value:
            yield f"{indent}{name}:", ""
            for key, entry in value.items():
                yield f"{indent}  {key}:", ""
                yield from _rows(entry, f"{prefix}{name}.{key}.", depth + 2, config)
        elif isinstance(value, SecretStr):
            yield f"{indent}{name}: null", f"secret, not shown; {config.sources[f'{prefix}{name}']}"
        else:
            yield (
                f"{indent}{name}: {_as_yaml(value)}",
                _origin(f"{prefix}{name}", value, declared.default, config),
            )
    for name, value in (section.model_extra or {}).items():
        yield f"{indent}{name}: {_as_yaml(value)}", _origin(f"{prefix}{name}", value, None, config)


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
