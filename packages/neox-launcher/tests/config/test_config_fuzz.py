"""Whatever a file holds, the answer is a configuration or sentences: never a traceback, never a hang."""

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from neox_launcher.config import decode_resolved, encode_resolved, load_config, resolve
from neox_launcher.config.aliases import OLDER_SPELLINGS, SHORTHANDS
from neox_launcher.config.display import show_config
from neox_launcher.config.schema import all_parameters
from neox_launcher.errors import ConfigError

MINIMAL = {
    "num-layers": 4,
    "hidden-size": 64,
    "num-attention-heads": 4,
    "max-position-embeddings": 32,
    "train-iters": 10,
    "train-micro-batch-size-per-gpu": 2,
    "lr": 0.001,
}
NAMES = [parameter.name for parameter in all_parameters()] + [*SHORTHANDS, *OLDER_SPELLINGS]
CHOICES = sorted({choice for parameter in all_parameters() for choice in parameter.choices})

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["global", "all", "cpu", "nvme", "5e8", "1_000", ".nan", *CHOICES]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
documents = st.dictionaries(st.sampled_from(NAMES), values, max_size=6)


def outcome(text, *overrides):
    """The configuration, or the sentences."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzz.yml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        try:
            return load_config([path], overrides=overrides)
        except ConfigError as error:
            refusal = error
    assert refusal.problems
    assert all(problem.what for problem in refusal.problems)
    assert "problem" in str(refusal)
    return None


def nested(flat):
    """Dotted names as blocks; a name whose block has become a value is left out."""
    tree = {}
    for name, value in flat.items():
        at, *parts = tree, *name.split(".")
        for part in parts[:-1]:
            inner = at.setdefault(part, {})
            if not isinstance(inner, dict):
                break
            at = inner
        else:
            at[parts[-1]] = value
    return tree


@settings(max_examples=150, deadline=None)
@given(documents)
def test_any_value_of_any_parameter_gives_a_configuration_or_sentences(document):
    config = outcome(json.dumps(nested(MINIMAL | document)))
    if config is None:
        return
    try:
        resolved = resolve(config, devices=4)
    except ConfigError:
        return
    assert decode_resolved(encode_resolved(resolved)) == resolved
    assert outcome(show_config(config)) == config


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet="{}[]:,&*!<-? \n\t\"'#|>%@a1.~", max_size=60))
def test_garbage_gives_sentences(text):
    assert outcome(text) is None


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=20), st.text(alphabet="{}[]:,&*!a1. \"'", max_size=15))
def test_any_override_gives_a_configuration_or_sentences(name, value):
    outcome(json.dumps(MINIMAL), f"{name}={value}", value)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 400), st.text(alphabet='{}[]:,"x5\n ', max_size=3))
def test_a_mutilated_file_gives_a_configuration_or_sentences(place, insertion):
    text = json.dumps(MINIMAL, indent=1)
    outcome(text[:place] + insertion + text[place + len(insertion) :])
