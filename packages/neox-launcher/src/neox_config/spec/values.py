"""Specifications as flat dictionaries and back, for JSON, comparisons and tables of other programs' names.

A value is found by its path, such as `layers.mixer.heads`. A path through a list has one value if all entries
agree, else one per entry (`Each`). Where a field can hold values of several classes, its own path holds the
name of the class; that of a list holds the number of entries.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

__all__ = ["ABSENT", "Each", "changes", "flat", "of", "parameters_of", "type_of", "unflat"]


class _Absent:
    """What a path holds in an entry of a list that has no such path."""

    def __repr__(self) -> str:
        return "absent"


ABSENT: Any = _Absent()


@dataclass(frozen=True, slots=True)
class Each:
    """The values of one path in the entries of a list, where they are not all the same."""

    values: tuple[Any, ...]


def of(*parameters: str, **options: Any) -> Any:
    """Declare a field that follows from these parameters; messages name the first one."""
    return field(metadata={"parameters": parameters}, **options)


def flat(value: Any) -> dict[str, Any]:
    """Return the values of a specification by path."""
    return dict(_flat(value, ""))


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    kind: Any = type(value)
    hints = _hints(kind)
    for each in fields(value):
        path, found = f"{prefix}{each.name}", getattr(value, each.name)
        hint: Any = hints[each.name]
        if _entry_class(hint) is not None:
            yield path, len(found)
            entries = [dict(_flat(entry, f"{path}.")) for entry in found]
            for inner in dict.fromkeys(name for entry in entries for name in entry):
                values = tuple(entry.get(inner, ABSENT) for entry in entries)
                yield inner, values[0] if len(set(values)) == 1 else Each(values)
        elif is_dataclass(found):
            if not is_dataclass(hint):
                yield path, type(found).__name__
            yield from _flat(found, f"{path}.")
        else:
            yield path, found


def unflat(kind: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Return the specification of a class that has these values by path; others have their defaults."""
    found: dict[str, Any] = {}
    for each in fields(kind):
        path, hint = f"{prefix}{each.name}", _hints(kind)[each.name]
        if path not in values and each.default is not MISSING:
            continue
        entry = _entry_class(hint)
        if entry is not None:
            found[each.name] = tuple(
                unflat(entry, _of_entry(values, f"{path}.", index), f"{path}.")
                for index in range(values[path])
            )
        elif is_dataclass(hint):
            found[each.name] = unflat(hint, values, f"{path}.")
        elif values[path] in _classes(hint):
            found[each.name] = unflat(_classes(hint)[values[path]], values, f"{path}.")
        else:
            found[each.name] = values[path]
    return kind(**found)


def _of_entry(values: Mapping[str, Any], prefix: str, index: int) -> dict[str, Any]:
    """Return the values of one entry of a list."""
    inner = {path: value for path, value in values.items() if path.startswith(prefix)}
    return {path: value.values[index] if isinstance(value, Each) else value for path, value in inner.items()}


def changes(one: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    """Return the values that differ between two specifications of one class, by path.

    Of two lists of different lengths only the lengths are compared, and where the classes of two values
    differ, only these. What `==` does not compare is left out.
    """
    ones, others, found = flat(one), flat(other), dict[str, tuple[Any, Any]]()
    for path in dict.fromkeys((*ones, *others)):
        pair = ones.get(path, ABSENT), others.get(path, ABSENT)
        if (
            pair[0] != pair[1]
            and not any(path.startswith(f"{found_before}.") for found_before in found)
            and _declared(type(one), path)[0].compare
        ):
            found[path] = pair
    return found


def parameters_of(kind: Any, path: str) -> tuple[str, ...]:
    """Return the parameters that a path of a specification follows from."""
    return tuple(_declared(kind, path)[0].metadata.get("parameters", ()))


def type_of(kind: Any, path: str) -> Any:
    """Return the type of a path of a specification."""
    return _declared(kind, path)[1]


def _declared(kind: Any, path: str) -> tuple[Field[Any], Any]:
    """Return the field that a path of a specification leads to, and its type."""
    name, _, rest = path.partition(".")
    declared, hint = next(each for each in fields(kind) if each.name == name), _hints(kind)[name]
    if not rest:
        return declared, hint
    inner = _entry_class(hint) or hint
    classes = [inner] if is_dataclass(inner) else _classes(hint).values()
    wanted = rest.partition(".")[0]
    return next(_declared(each, rest) for each in classes if wanted in {field.name for field in fields(each)})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _entry_class(hint: Any) -> Any:
    """Return the class of the entries of a list of specifications; None for another type."""
    entry = get_args(hint)[0] if get_origin(hint) is tuple and get_args(hint) else None
    return entry if is_dataclass(entry) else None


def _classes(hint: Any) -> dict[str, Any]:
    """Return the specifications among the types of a field, by name."""
    return {each.__name__: each for each in get_args(hint) if isinstance(each, type) and is_dataclass(each)}
