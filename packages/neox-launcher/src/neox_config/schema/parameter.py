"""Declaration of parameters; each parameter is declared once, with all its properties.

`param()` declares a field of a `Section`, `block()` a nested group of fields, and `named_blocks()` groups
with names chosen by the user. Loader, commands, documentation and JSON schema are all based on
`Section.parameters()`.
"""

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from neox_config.schema.paths import is_path
from neox_config.schema.scalars import LARGEST, WORDS, read_scalar, written_limit

__all__ = [
    "FILLED_IN",
    "InvalidValue",
    "Parameter",
    "Resume",
    "Section",
    "block",
    "choices_of",
    "condition_of",
    "entry_section",
    "inner_section",
    "is_filled_in",
    "is_needed",
    "key_of",
    "named_blocks",
    "param",
    "resume_of",
    "scalars_of",
    "why_not_used",
]

# Effect of a change when training resumes: another model (refused), other results (reported), or nothing.
Resume = Literal["model", "training", "free"]

# Default of a field that the loader computes from other values if it is not given.
FILLED_IN: Any = object()

_NOT_USED = "Not used: "
_NEEDED = "required when the block is enabled"


def param(
    default: Any = PydanticUndefined,
    *,
    doc: str,
    origin: str,
    none_means: str | None = None,
    used_when: str | None = None,
    source: str | None = None,
    free_choice: str | None = None,
    needed: bool = False,
    may_have_lines: bool = False,
    resume: Resume | None = None,
    **limits: Any,
) -> Any:
    """Declare a parameter of a `Section`.

    Args:
        default: default value; without it, the parameter is required; FILLED_IN means that the loader
            computes it if it is not given.
        doc: what it does, in one or two sentences.
        origin: project that the name comes from: DSL, DSC, Meg, NeoX, or ours.
        none_means: meaning of the default None (or FILLED_IN); required with these.
        used_when: condition under which the parameter has an effect.
        source: publication that defines its mathematics.
        free_choice: description of possible values that the type does not express.
        needed: True if a parameter with a default of None is required when `enabled` of its block is true.
        may_have_lines: True if a text may contain line breaks and tabs.
        resume: effect of a change when training resumes; None means that of its section.
        limits: `ge`, `gt`, `le`, `lt`, `min_length`, `pattern`, as in pydantic.
    """
    if not doc:
        raise TypeError("a parameter needs a doc")
    if needed:
        none_means = _NEEDED
    is_filled_in = default is FILLED_IN
    if (default is None or is_filled_in) and not none_means:
        raise TypeError(f"a default of None needs none_means (doc: {doc!r})")
    details = {
        "origin": origin,
        "none_means": none_means,
        "used_when": used_when,
        "source": source,
        "free_choice": free_choice,
        "filled_in": is_filled_in,
        "needed": needed,
        "may_have_lines": may_have_lines,
        "resume": resume,
    }
    make: Any = Field
    return make(
        PydanticUndefined if is_filled_in else default,
        description=doc,
        json_schema_extra={"neox": details},
        **limits,
    )


def block(kind: type["Section"] | None = None, *, doc: str, origin: str, resume: Resume | None = None) -> Any:
    """Declare a nested group of parameters; without `kind`, it has no default.

    Args:
        kind: section of the group; omit it if the group contains a required parameter.
        doc: purpose of the group.
        origin: project that the name comes from.
        resume: effect of a change of its parameters when training resumes, unless they declare it; None means
            that of the section around.
    """
    extra: dict[str, Any] = {"neox": {"origin": origin, "resume": resume}}
    if kind is None:
        return Field(description=doc, json_schema_extra=extra)
    # Constructed without validation, so that blocks that are not given do not build a pydantic schema.
    # Once: blocks are frozen.
    return Field(default_factory=cache(kind.model_construct), description=doc, json_schema_extra=extra)


def named_blocks(key: str, *, doc: str, origin: str, needed: bool = False) -> Any:
    """Declare groups of parameters with names chosen by the user; none by default.

    Args:
        key: noun for what is named; the reference shows it as `<key>`.
        doc: purpose of the groups.
        origin: project that the name comes from.
        needed: True if at least one is required when `enabled` of the block around is true.
    """
    extra: dict[str, Any] = {"neox": {"origin": origin, "key": key, "needed": needed}}
    return Field(default_factory=dict, description=doc, json_schema_extra=extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Properties of one parameter.

    Args:
        name: name, dotted if nested.
        type: type in words.
        choices: possible values, if they can be listed.
        default: default value; None if `required` or if the default is None.
        required: True if there is no default.
        doc: what it does.
        limits: limits in words; empty if there are none.
        origin: project that the name comes from.
        none_means: meaning of None.
        used_when: condition under which the parameter has an effect.
        source: publication that defines its mathematics.
        is_block: True for a group of parameters.
        needed: True if it is required when its block is enabled.
        resume: effect of a change when training resumes; None for blocks.
    """

    name: str
    type: str
    choices: tuple[str, ...]
    default: Any
    required: bool
    doc: str
    limits: str
    origin: str
    none_means: str | None
    used_when: str | None
    source: str | None
    is_block: bool
    needed: bool
    resume: Resume | None


class InvalidValue(Exception):  # noqa: N818
    """A value was read that the user gave wrongly or left out; the problem is reported already."""


class Section(BaseModel):
    """A group of parameters; frozen, and without unknown names.

    `class Name(Section, resume=...)` sets the effect of a change of its parameters when training resumes,
    unless they declare it.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True, defer_build=True
    )

    resume_default: ClassVar[Resume | None] = None

    def __init_subclass__(cls, *, resume: Resume | None = None, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        cls.resume_default = resume

    if not typing.TYPE_CHECKING:  # With a declared __getattr__, mypy would accept every name.

        def __getattr__(self, name: str) -> Any:
            """Raise InvalidValue for a declared parameter without a value; called if it is not there."""
            if name in type(self).model_fields:
                raise InvalidValue(name)
            return super().__getattr__(name)

    @field_validator("*", mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        """Convert a value to the type of its field, see `read_scalar`."""
        name = info.field_name
        if name is None or name not in cls.model_fields:
            return value
        may_have_lines = bool(_details(cls.model_fields[name]).get("may_have_lines"))
        return read_scalar(value, scalars_of(cls, name), may_have_lines=may_have_lines)

    @classmethod
    def parameters(cls, prefix: str = "", around: Resume | None = None) -> Iterator[Parameter]:
        """Yield the parameters in order of declaration; blocks are followed by their content.

        Args:
            prefix: prefix of the names.
            around: `resume` of the section or block around this one.

        Raises:
            TypeError: Neither a parameter nor a section or block around it declares `resume`.
        """
        for name, field in cls.model_fields.items():
            resume = resume_of(cls, name, around)
            yield _describe(prefix + name, field, resume)
            inner, entry = inner_section(field), entry_section(field)
            if inner is not None:
                yield from inner.parameters(f"{prefix}{name}.", resume)
            if entry is not None:
                each = f"{prefix}{name}.{key_of(field)}"
                doc = (entry.__doc__ or "").partition("\n")[0]
                yield replace(_describe(each, field, None), doc=doc, needed=False)
                yield from entry.parameters(f"{each}.", resume)

    def replaced(self, **changes: Any) -> Self:
        """Return the section with some values changed."""
        return self.model_copy(update=changes)


def inner_section(field: FieldInfo) -> type[Section] | None:
    """Return the section of a block field, or None for an ordinary parameter."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def entry_section(field: FieldInfo) -> type[Section] | None:
    """Return the section of the entries of a `named_blocks` field, or None for any other field."""
    if get_origin(field.annotation) is not dict:
        return None
    kind = get_args(field.annotation)[1]
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def key_of(field: FieldInfo) -> str:
    """Return the placeholder for a name chosen by the user: `<group>`."""
    return f"<{_details(field).get('key')}>"


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """Return the choices of a field, if they can be listed."""
    kinds = _members(field.annotation)
    return tuple(str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind))


def condition_of(field: FieldInfo) -> str | None:
    """Return the condition under which the field has an effect, or None if it always has."""
    condition: str | None = _details(field).get("used_when")
    return condition


def is_needed(field: FieldInfo) -> bool:
    """Return True if the field is required when its block is enabled."""
    return bool(_details(field).get("needed"))


def is_filled_in(field: FieldInfo) -> bool:
    """Return True if the loader computes the field if it is not given."""
    return bool(_details(field).get("filled_in"))


def why_not_used(doc: str) -> str | None:
    """Return why a parameter never has an effect, as its doc says after "Not used: "; else None."""
    return doc.removeprefix(_NOT_USED).rstrip(".") if doc.startswith(_NOT_USED) else None


def resume_of(section: type[Section], name: str, around: Resume | None) -> Resume | None:
    """Return the effect of a change of a field when training resumes: its own, its section's, or `around`."""
    field = section.model_fields.get(name)
    own: Resume | None = None if field is None else _details(field).get("resume")
    return own or section.resume_default or around


def _details(field: FieldInfo) -> dict[str, Any]:
    extra = field.json_schema_extra
    found = extra.get("neox") if isinstance(extra, dict) else None
    return found if isinstance(found, dict) else {}


def _describe(name: str, field: FieldInfo, resume: Resume | None) -> Parameter:
    details = _details(field)
    kinds = _members(field.annotation)
    free = details.get("free_choice")
    is_block = inner_section(field) is not None or entry_section(field) is not None
    default = None if field.default is PydanticUndefined else field.default
    if resume is None and not is_block:
        raise TypeError(f"{name} does not declare `resume`, the effect of a change when training resumes")
    return Parameter(
        name=name,
        type="block" if is_block else _type_in_words(kinds, are_paths=is_path(field)),
        choices=choices_of(field) or ((free,) if free else ()),
        default=default,
        required=field.is_required() and not is_block and not details.get("filled_in"),
        doc=field.description or "",
        limits=_limits_in_words(field, kinds),
        origin=details.get("origin") or "",
        none_means=details.get("none_means"),
        used_when=details.get("used_when"),
        source=details.get("source"),
        is_block=is_block,
        needed=is_needed(field),
        resume=None if is_block else resume,
    )


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union; for a single type, the type itself; without annotations."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(member for part in get_args(annotation) for member in _members(part))
    return (annotation,)


def _type_in_words(kinds: tuple[Any, ...], *, are_paths: bool) -> str:
    words = []
    for kind in kinds:
        if kind is type(None):
            continue
        origin = get_origin(kind)
        if origin is tuple:
            inner = {arg for arg in get_args(kind) if arg is not Ellipsis}
            of = ["paths"] if are_paths else [f"{WORDS[arg]}s" for arg in inner if arg in (int, float)]
            words.append("list" + "".join(f" of {each}" for each in of))
        else:
            word = "choice" if origin is Literal else WORDS.get(origin or kind, "any")
            words.append(f"{word} (path)" if are_paths else word)
    return " or ".join(dict.fromkeys(words))


_LIMIT_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def _limits_in_words(field: FieldInfo, kinds: tuple[Any, ...]) -> str:
    """Return the declared limits; if no upper limit is declared, that of all numbers of the type.

    A parameter with a list of choices has only its declared limits.
    """
    found = {
        sign: value
        for item in field.metadata
        for name, sign in _LIMIT_SIGNS.items()
        if (value := getattr(item, name, None)) is not None
    }
    largest = next((LARGEST[kind] for kind in (float, int) if kind in kinds), None)
    has_choices = _details(field).get("free_choice") is not None
    if largest is not None and not has_choices and found.keys().isdisjoint({"<", "<="}):
        found["<="] = largest
    return ", ".join(f"{sign} {written_limit(value)}" for sign, value in found.items())


@cache
def scalars_of(section: type[Section], name: str) -> frozenset[Any]:
    """Return the scalar types and choices of a field; empty if it is not a scalar."""
    kinds = [str if kind is SecretStr else kind for kind in _members(section.model_fields[name].annotation)]
    scalars = {kind for kind in kinds if kind in (bool, int, float, str)}
    choices = {choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)}
    return frozenset(scalars | choices)
