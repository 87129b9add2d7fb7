"""The JSON schema accepts what the reader accepts, and rejects what it refuses."""

import json
import re
from pathlib import Path

import pytest
import yaml

from neox_config.describe.json_schema import json_schema, json_schema_text
from neox_config.errors import ConfigError

ROOT = Path(__file__).parents[5]
EXAMPLES = sorted((ROOT / "configs").glob("*.yml"))
EVERY_BLOCK = Path(__file__).parents[2] / "data/every_block.yml"
SCHEMA = json_schema()
KINDS = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "null": type(None)}


def is_of_kind(kind, value):
    if kind in ("integer", "number"):
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return not isinstance(value, bool) and (is_whole or (kind == "number" and isinstance(value, float)))
    return isinstance(value, KINDS[kind])


def referred_to(schema):
    root, home, name = schema["$ref"].split("/")
    assert root == "#"
    return SCHEMA[home][name]


def accepts(schema, value):
    """Whether a schema takes a value, by the words of JSON Schema that ours uses."""
    if "$ref" in schema and not accepts(referred_to(schema), value):
        return False
    if "anyOf" in schema and not any(accepts(each, value) for each in schema["anyOf"]):
        return False
    if "type" in schema and not is_of_kind(schema["type"], value):
        return False
    if ("enum" in schema and value not in schema["enum"]) or schema.get("const", value) != value:
        return False
    if isinstance(value, dict):
        return all(takes_entry(schema, name, inner) for name, inner in value.items())
    if isinstance(value, list):
        return len(value) >= schema.get("minItems", 0) and all(
            accepts(schema.get("items", {}), each) for each in value
        )
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None
    return value is None or (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and not value <= schema.get("exclusiveMinimum", value - 1)
        and not value >= schema.get("exclusiveMaximum", value + 1)
    )


def takes_entry(schema, name, value):
    patterns = schema.get("patternProperties", {})
    if name in schema.get("properties", {}):
        return accepts(schema["properties"][name], value)
    if any(re.search(pattern, name) for pattern in patterns):
        return True
    others = schema.get("additionalProperties", True)
    return others if isinstance(others, bool) else accepts(others, value)


def test_the_json_schema_in_docs_is_current():
    written = (ROOT / "docs/configuration.schema.json").read_text(encoding="utf-8")
    assert written == json_schema_text() + "\n", "run: make docs"
    assert json.loads(written) == SCHEMA


@pytest.mark.parametrize("path", [*EXAMPLES, EVERY_BLOCK], ids=lambda path: path.name)
def test_no_example_is_flagged(path):
    """Read as editors read YAML: 5e8 is a number or text, never an error."""
    assert accepts(SCHEMA, yaml.safe_load(path.read_text()))


def test_both_spellings_and_other_names_are_known_and_nothing_else():
    properties = SCHEMA["properties"]
    assert properties["num-layers"] == {"$ref": "#/properties/num_layers"}
    assert properties["gas"] == {"deprecated": True}
    assert SCHEMA["$defs"]["ZeroOptimization"]["properties"]["cpu_offload"] == {"deprecated": True}
    assert not accepts(SCHEMA, {"num-layerz": 2})
    assert not accepts(SCHEMA, {"zero_optimization": {"stge": 1}})
    assert '"neox":' not in json.dumps(SCHEMA)


SPELLINGS = [
    '{"activation": "GELU"}',
    '{"norm": "RMSNorm", "pos-emb": "ROTARY"}',
    '{"log-interval": null}',
    '{"optimizer": null, "data-path": null}',
    '{"hidden-dropout": "0.1", "seed": "1_000"}',
    '{"zero_optimization": {"stage": "1", "reduce_bucket_size": "5e8", "overlap_comm": "True"}}',
    '{"zero_optimization": true}',
    '{"zero_optimization": {"stage": 3, "offload-param": {"device": "CPU"}}}',
    '{"pipe-partition-method": "Type:TransformerLayer"}',
    '{"compile": "Auto", "bias-gelu-fusion": "FALSE"}',
    '{"train-iters": 10.0}',
]
MISTAKES = [
    '{"activation": "gelo"}',
    '{"hidden-dropout": 1.5}',
    '{"hidden-dropout": "much"}',
    '{"seed": -1}',
    '{"zero_optimization": {"stage": 4}}',
    '{"zero_optimization": {"overlap_comm": 1}}',
    '{"pipe-partition-method": "types"}',
    '{"split": "969;30;1"}',
    '{"optimizer": {"params": {"betas": 0.9}}}',
]


@pytest.mark.parametrize("text", SPELLINGS)
def test_schema_accepts_values_that_the_reader_accepts(load, text):
    load("{}", *(f"{name}={json.dumps(value)}" for name, value in json.loads(text).items()))
    assert accepts(SCHEMA, json.loads(text))


@pytest.mark.parametrize("text", MISTAKES)
def test_schema_rejects_values_that_the_reader_rejects(load, text):
    with pytest.raises(ConfigError):
        load("{}", *(f"{name}={json.dumps(value)}" for name, value in json.loads(text).items()))
    assert not accepts(SCHEMA, json.loads(text))


def test_patterns_use_syntax_supported_by_editors():
    assert "(?" not in json.dumps(SCHEMA)
