"""A JSON schema of configuration files, for editors that complete and check while one types.

It takes what the reader takes: choices in any case, quoted numbers, words for true and false, and null for
whatever is left out. It flags no name for being absent, because files are parts of a whole.
"""

import re
from collections.abc import Iterable
from typing import Any

from neox_launcher.config.aliases import COMPUTED, OLDER_SPELLINGS, RETIRED, SHORTHANDS
from neox_launcher.config.parameter import inner_section
from neox_launcher.config.scalars import NUMBER
from neox_launcher.config.schema import field_named, sections

__all__ = ["json_schema"]

# What stays beside the kinds of value that a parameter takes.
_NOTES = ("default", "deprecated", "description")
_NULL = {"type": "null"}


def json_schema() -> dict[str, Any]:
    """The schema, as draft 2020-12; its patterns are those of ECMA-262."""
    properties: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for section in sections().values():
        schema = section.model_json_schema()
        definitions |= schema.get("$defs", {})
        properties |= schema["properties"]
    blocks = {name: _block(definition) for name, definition in definitions.items()}
    properties = _block({"properties": properties})["properties"]
    for name in list(properties):
        properties.setdefault(name.replace("_", "-"), properties[name])
    for name in (*SHORTHANDS, *OLDER_SPELLINGS, *COMPUTED, *RETIRED):
        _add_other_name(name, properties, blocks)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "NeoX configuration",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "$defs": blocks | _WRITTEN,
    }


def _block(definition: dict[str, Any]) -> dict[str, Any]:
    """A block of parameters; names with dashes are accepted in it, and not looked at."""
    return {
        "type": "object",
        "additionalProperties": definition.get("additionalProperties", True),
        "patternProperties": {"-": {}},
        "properties": {name: _parameter(found) for name, found in definition["properties"].items()},
    }


def _parameter(schema: dict[str, Any]) -> dict[str, Any]:
    """What may stand behind a name: the kinds that are declared, other ways to write them, and null."""
    notes = {name: schema[name] for name in _NOTES if name in schema}
    own = {name: part for name, part in schema.items() if name not in (*notes, "neox", "title")}
    kinds: list[dict[str, Any]] = []
    for kind in own.get("anyOf", [own]):
        kinds += [each for each in (_portable(kind), *_ways_to_write(kind)) if each not in kinds]
    return notes | {"anyOf": kinds if _NULL in kinds else [*kinds, _NULL]}


def _ways_to_write(kind: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """What the reader makes such a value of, beside the value itself."""
    choices = kind.get("enum", [kind["const"]] if "const" in kind else [])
    if choices and isinstance(choices[0], str):
        yield {"type": "string", "pattern": f"^({'|'.join(map(_in_any_case, choices))})$"}
    elif choices:
        yield {"type": "string", "enum": [str(choice) for choice in choices]}
    elif kind.get("type") in ("integer", "number"):
        yield {"$ref": "#/$defs/written_number"}
    elif kind.get("type") == "boolean":
        yield {"$ref": "#/$defs/written_switch"}


def _portable(kind: dict[str, Any]) -> dict[str, Any]:
    """The kind with a pattern that editors know: theirs have no `(?i:...)`."""
    if "pattern" not in kind:
        return kind
    pattern = re.sub(r"\(\?i:([^)]*)\)", lambda found: f"({_in_any_case(found[1])})", kind["pattern"])
    return kind | {"pattern": pattern}


def _in_any_case(pattern: str) -> str:
    return re.sub("[a-zA-Z]", lambda found: f"[{found[0].upper()}{found[0].lower()}]", pattern)


# What editors take for text where the reader sees a number, or true or false.
_WRITTEN = {
    "written_number": {"type": "string", "pattern": rf"^\s*{NUMBER.pattern}\s*$"},
    "written_switch": {"type": "string", "pattern": f"^({_in_any_case('true|false|yes|no|on|off')})$"},
}


def _add_other_name(name: str, properties: dict[str, Any], blocks: dict[str, Any]) -> None:
    """Accept a name that is not a parameter's own; of a block that may also be a switch, the switch."""
    block, _, own = name.rpartition(".")
    if not block:
        properties.setdefault(own.replace("_", "-"), {"deprecated": True})
    declared = field_named(block)
    kind = None if declared is None else inner_section(declared)
    if block and kind is None:
        # The block is another name itself, and nothing in it is looked at.
        return
    holder = properties if kind is None else blocks[kind.__name__]["properties"]
    found = holder.setdefault(own, {"deprecated": True})
    if name in OLDER_SPELLINGS and "anyOf" in found:
        found["anyOf"].append({"type": "boolean"})
