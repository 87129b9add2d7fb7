"""How a parameter is declared: once, with everything that is known about it.

`param()` makes a field, `block()` a nested group of fields of a `Section`, and `named_blocks()` such groups
under names that the user chooses. The loader, the commands, the documentation and the JSON schema read
`Section.parameters()` and nothing else.
"""

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from neox_launcher.config.scalars import WORDS, read_scalar

__all__ = [
    "FILLED_IN",
    "Parameter",
    "Resume",
    "Section",
    "block",
    "condition_of",
    "entry_section",
    "inner_section",
    "is_filled_in",
    "is_needed",
    "key_of",
    "named_blocks",
    "param",
    "resume_of",
]

# What a change means for a training that resumes: another model (refused), another training (reported), or
# nothing.
Resume = Literal["model", "training", "free"]

# Default of a field that the loader computes from other values when it is absent.
FILLED_IN: Any = object()

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
    resume: Resume | None = None,
    **limits: Any,
) -> Any:
    """One parameter of a `Section`.

    Args:
        default: absent = the parameter is required; FILLED_IN = computed by the loader when not given.
        doc: what it does, in one or two sentences.
        origin: the family whose name it is: DSL, DSC, Meg, NeoX, or ours.
        none_means: what the default None (or FILLED_IN) stands for; required with these.
        used_when: the setting that brings it into play.
        source: where its mathematics comes from.
        free_choice: values that are possible where the type cannot say it.
        needed: with a default of None: must be given when `enabled` of its block is true.
        resume: what a change means for a training that resumes; None: what its section says.
        limits: `ge`, `gt`, `le`, `lt`, `min_length`, `pattern`, as pydantic knows them.
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
    """A nested group of parameters; without `kind` it holds a required parameter and has no default.

    Args:
        kind: the section that it is.
        doc: what the parameters are for.
        origin: the family whose name it is.
        resume: of the parameters that do not declare it themselves; None: what the section around says.
    """
    extra: dict[str, Any] = {"neox": {"origin": origin, "resume": resume}}
    if kind is None:
        return Field(description=doc, json_schema_extra=extra)
    # Constructed, not validated: a block that nobody writes costs no schema.
    return Field(default_factory=kind.model_construct, description=doc, json_schema_extra=extra)


def named_blocks(key: str, *, doc: str, origin: str, needed: bool = False) -> Any:
    """Groups of parameters under names that the user chooses, none by default.

    Args:
        key: what a name is the name of; the reference shows it as `<key>`.
        doc: what the groups are.
        origin: the family whose name it is.
        needed: there must be one when `enabled` of the block around it is true.
    """
    extra: dict[str, Any] = {"neox": {"origin": origin, "key": key, "needed": needed}}
    return Field(default_factory=dict, description=doc, json_schema_extra=extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Everything that is known about one parameter.

    Args:
        name: as users write it, dotted when nested.
        type: the type in words.
        choices: the values possible, when they can be listed.
        default: None when `required` or when None is the default.
        required: there is no default.
        doc: what it does.
        limits: in words, empty when there are none.
        origin: the family whose name it is.
        none_means: what None stands for.
        used_when: the setting that brings it into play.
        source: where its mathematics comes from.
        is_block: it is a group of parameters.
        needed: must be given when its block is enabled.
        resume: what a change means for a training that resumes; None for blocks.
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


class Section(BaseModel):
    """A group of parameters; frozen, and strict about names.

    `class Name(Section, resume=...)` says what a change of its parameters means for a training that resumes,
    where they do not declare it themselves.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True, defer_build=True
    )

    resume_default: ClassVar[Resume | None] = None

    def __init_subclass__(cls, *, resume: Resume | None = None, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        cls.resume_default = resume

    @field_validator("*", mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        """The value as its field's type understands it, see the module's docstring."""
        name = info.field_name
        if name is None or name not in cls.model_fields:
            return value
        return read_scalar(value, _scalars_of(cls, name))

    @classmethod
    def parameters(cls, prefix: str = "", around: Resume | None = None) -> Iterator[Parameter]:
        """The parameters in order of declaration, blocks first and then what they hold.

        Args:
            prefix: of their names.
            around: `resume` of the section or block around this one.

        Raises:
            TypeError: neither a parameter nor what is around it declares `resume`.
        """
        for name, field in cls.model_fields.items():
            resume = resume_of(cls, name, around)
            yield _describe(prefix + name, field, resume)
            inner, entry = inner_section(field), entry_section(field)
            if inner is not None:
                yield from inner.parameters(f"{prefix}{name}.", resume)
            if entry is not None:
                each = f"{prefix}{name}.{key_of(field)}"
                yield _describe_entry(each, entry, field)
                yield from entry.parameters(f"{each}.", resume)

    def replaced(self, **changes: Any) -> Self:
        """The same section with some values changed."""
        return self.model_copy(update=changes)


def inner_section(field: FieldInfo) -> type[Section] | None:
    """The section that a block field holds, or None for an ordinary parameter."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def entry_section(field: FieldInfo) -> type[Section] | None:
    """The section that each entry of a field of `named_blocks` holds, or None for any other field."""
    if get_origin(field.annotation) is not dict:
        return None
    kind = get_args(field.annotation)[1]
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def key_of(field: FieldInfo) -> str:
    """How the reference shows a name that the user chooses: `<group>`."""
    return f"<{_details(field).get('key')}>"


def condition_of(field: FieldInfo) -> str | None:
    """The setting that brings the field into play, in words; None when it always is."""
    found = _details(field).get("used_when")
    return found if isinstance(found, str) else None


def is_needed(field: FieldInfo) -> bool:
    """Whether the field must be given when its block is enabled."""
    return bool(_details(field).get("needed"))


def is_filled_in(field: FieldInfo) -> bool:
    """Whether the loader computes the field when it is absent."""
    return bool(_details(field).get("filled_in"))


def resume_of(section: type[Section], name: str, around: Resume | None) -> Resume | None:
    """What a change of a field means for a training that resumes: its own word, its section's, `around`."""
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
    choices = tuple(str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind))
    free = details.get("free_choice")
    is_block = inner_section(field) is not None or entry_section(field) is not None
    default = None if field.default is PydanticUndefined else field.default
    if resume is None and not is_block:
        raise TypeError(f"{name} declares no `resume`: what a change means for a training that resumes")
    return Parameter(
        name=name,
        type="block" if is_block else _type_in_words(kinds),
        choices=choices or ((free,) if free else ()),
        default=default,
        required=field.is_required() and not is_block and not details.get("filled_in"),
        doc=field.description or "",
        limits=_limits_in_words(field),
        origin=details.get("origin") or "",
        none_means=details.get("none_means"),
        used_when=details.get("used_when"),
        source=details.get("source"),
        is_block=is_block,
        needed=is_needed(field),
        resume=None if is_block else resume,
    )


def _describe_entry(name: str, kind: type[Section], field: FieldInfo) -> Parameter:
    """The parameter that stands for every entry of named blocks."""
    doc = (kind.__doc__ or "").partition("\n")[0]
    return replace(_describe(name, field, None), doc=doc, needed=False)


def _members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union; a single type is the only alternative."""
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(member for part in get_args(annotation) for member in _members(part))
    return (annotation,)


def _type_in_words(kinds: tuple[Any, ...]) -> str:
    words = []
    for kind in kinds:
        if kind is type(None):
            continue
        origin = get_origin(kind)
        if origin is tuple:
            inner = {arg for arg in get_args(kind) if arg is not Ellipsis}
            words.append("list" + "".join(f" of {WORDS[arg]}s" for arg in inner if arg in (int, float)))
        else:
            words.append("choice" if origin is Literal else WORDS.get(origin or kind, "any"))
    return " or ".join(dict.fromkeys(words))


_LIMIT_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def _limits_in_words(field: FieldInfo) -> str:
    found = []
    for item in field.metadata:
        for name, sign in _LIMIT_SIGNS.items():
            value = getattr(item, name, None)
            if value is not None:
                found.append(f"{sign} {value}")
    return ", ".join(found)


@cache
def _scalars_of(section: type[Section], name: str) -> frozenset[Any]:
    """The scalar types that a field takes, with its choices; empty where it takes something else."""
    kinds = [str if kind is SecretStr else kind for kind in _members(section.model_fields[name].annotation)]
    scalars = {kind for kind in kinds if kind in (bool, int, float, str)}
    choices = {choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)}
    return frozenset(scalars | choices)
