"""JSON schema of configuration files, for completion and validation in editors.

The schema accepts the same values as the reader: case-insensitive choices, quoted numbers, words for true and
false, and null for parameters that are not given. No name is required, because a configuration can be split
into several files.

The spelling with dashes refers to the one with underscores.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from neox_config.read.aliases import accepted_names
from neox_config.read.older import OLDER_SPELLINGS
from neox_config.schema.config import field_named, sections
from neox_config.schema.parameter import inner_section
from neox_config.schema.scalars import NUMBER

__all__ = ["json_schema", "json_schema_text"]

# Keys that are kept next to the types of a parameter.
_NOTES = ("default", "deprecated", "description")
_NULL = {"type": "null"}


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12, with ECMA-262 patterns)."""
    properties: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for section in sections().values():
        schema = section.model_json_schema()
        definitions |= schema.get("$defs", {})
        properties |= schema["properties"]
    blocks = {name: _block(definition) for name, definition in definitions.items()}
    properties = _block({"properties": properties})["properties"]
    for name in [name for name in properties if "_" in name]:
        properties.setdefault(name.replace("_", "-"), {"$ref": f"#/properties/{name}"})
    for name in accepted_names():
        _add_other_name(name, properties, blocks)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "NeoX configuration",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "$defs": blocks | _WRITTEN,
    }


def json_schema_text() -> str:
    """Return the schema as JSON text with one parameter per line."""
    return _written(json_schema())


def _written(value: Any, name: str = "", margin: str = "") -> str:
    """Return JSON text that breaks lines only between parameters and between definitions."""
    is_broken = isinstance(value, dict) and ("properties" in value or name in ("properties", "$defs"))
    if not is_broken:
        return json.dumps(value, allow_nan=False)
    inner = margin + " "
    entries = (
        f"{inner}{json.dumps(key, allow_nan=False)}: {_written(each, key, inner)}"
        for key, each in value.items()
    )
    return "{\n" + ",\n".join(entries) + f"\n{margin}}}"


def _block(definition: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a block; names with dashes are accepted in it without validation."""
    return {
        "type": "object",
        "additionalProperties": definition.get("additionalProperties", True),
        "patternProperties": {"-": {}},
        "properties": {name: _parameter(found) for name, found in definition["properties"].items()},
    }


def _parameter(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a parameter: its declared types, other ways to write them, and null."""
    notes = {name: schema[name] for name in _NOTES if name in schema}
    own = {name: part for name, part in schema.items() if name not in (*notes, "neox", "title")}
    kinds: list[dict[str, Any]] = []
    for kind in own.get("anyOf", [own]):
        kinds += [each for each in (_portable(kind), *_ways_to_write(kind)) if each not in kinds]
    return notes | {"anyOf": kinds if _NULL in kinds else [*kinds, _NULL]}


def _ways_to_write(kind: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Yield other ways to write a value that the reader converts to the given type."""
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
    """Return the type with a pattern that editors support, which do not know `(?i:...)`."""
    if "pattern" not in kind:
        return kind
    pattern = re.sub(r"\(\?i:([^)]*)\)", lambda found: f"({_in_any_case(found[1])})", kind["pattern"])
    return kind | {"pattern": pattern}


def _in_any_case(pattern: str) -> str:
    return re.sub("[a-zA-Z]", lambda found: f"[{found[0].upper()}{found[0].lower()}]", pattern)


# Values that are text for editors, and numbers or true or false for the reader.
_WRITTEN = {
    "written_number": {"type": "string", "pattern": rf"^\s*{NUMBER.pattern}\s*$"},
    "written_switch": {"type": "string", "pattern": f"^({_in_any_case('true|false|yes|no|on|off')})$"},
}


def _add_other_name(name: str, properties: dict[str, Any], blocks: dict[str, Any]) -> None:
    """Accept an alias; for a block that may also be written as a switch, accept true and false."""
    block, _, own = name.rpartition(".")
    if not block:
        properties.setdefault(own.replace("_", "-"), {"deprecated": True})
    declared = field_named(block)
    kind = None if declared is None else inner_section(declared)
    if block and kind is None:
        # The block is an alias itself, and its content is not validated.
        return
    holder = properties if kind is None else blocks[kind.__name__]["properties"]
    found = holder.setdefault(own, {"deprecated": True})
    if name in OLDER_SPELLINGS and "anyOf" in found:
        found["anyOf"].append({"type": "boolean"})
