"""Any file content gives a configuration or error messages, never a traceback or a hang."""

import json
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neox_config import decode_resolved, encode_resolved, load_config, resolve
from neox_config.describe.display import show_config
from neox_config.errors import ConfigError
from neox_config.names import answers
from neox_config.read.older import OLDER_SPELLINGS
from neox_config.schema.config import all_parameters

MINIMAL = {
    "num-layers": 4,
    "hidden-size": 64,
    "num-attention-heads": 4,
    "max-position-embeddings": 32,
    "train-iters": 10,
    "train-micro-batch-size-per-gpu": 2,
    "lr": 0.001,
}
CONFIGS = Path(__file__).parents[5] / "configs"
NAMES = [parameter.name for parameter in all_parameters()] + [*answers("shorthands"), *OLDER_SPELLINGS]
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


@contextmanager
def no_hang(seconds=60):
    """Stop a read that takes too long, with a traceback of where it was."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(text, *overrides):
    """Return the configuration, or the problems."""
    with tempfile.TemporaryDirectory() as folder, no_hang():
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


def assert_survives(text):
    """Sentences; or a configuration that is the same when it is shown, sent to a worker, and read again."""
    config = outcome(text)
    if config is None:
        return
    assert outcome(show_config(config)) == config
    try:
        resolved = resolve(config, devices=4)
    except ConfigError:
        return
    assert decode_resolved(encode_resolved(resolved)) == resolved


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(documents)
def test_any_value_of_any_parameter_gives_a_configuration_or_sentences(document):
    assert_survives(json.dumps(nested(MINIMAL | document)))


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


# The sweep: 10,000 documents of four kinds.
EXAMPLES = [path.read_text(encoding="utf-8") for path in sorted(CONFIGS.glob("*.yml"))]
INSERTIONS = [
    *"{}[]:,&*!#\"'-?|>%@\t\n\\\x00\x85\u2028\ufeff",
    "  ",
    ": ",
    "\n- ",
    "<<: *a",
    "&a ",
    "null",
    "1e999",
    "-1",
]


@st.composite
def mutated_examples(draw):
    """One of configs/ after some accidents."""
    text = draw(st.sampled_from(EXAMPLES))
    for _ in range(draw(st.integers(1, 5))):
        text = draw(st.sampled_from(ACCIDENTS))(draw, text)
    return text


def cut(draw, text):
    start = draw(st.integers(0, len(text)))
    return text[:start] + text[start + draw(st.integers(1, 20)) :]


def insert(draw, text):
    start = draw(st.integers(0, len(text)))
    return text[:start] + draw(st.sampled_from(INSERTIONS)) + text[start:]


def repeat_a_line(draw, text):
    lines = text.splitlines(keepends=True) or [""]
    line = draw(st.sampled_from(lines))
    lines.insert(draw(st.integers(0, len(lines))), line)
    return "".join(lines)


def indent_a_line(draw, text):
    lines = text.splitlines(keepends=True) or [""]
    place = draw(st.integers(0, len(lines) - 1))
    lines[place] = draw(st.sampled_from([" ", "  ", "\t"])) + lines[place]
    return "".join(lines)


def change_a_value(draw, text):
    lines = text.splitlines(keepends=True) or [""]
    place = draw(st.integers(0, len(lines) - 1))
    name = lines[place].partition(":")[0]
    lines[place] = f"{name}: {json.dumps(draw(values))}\n"
    return "".join(lines)


ACCIDENTS = [cut, insert, repeat_a_line, indent_a_line, change_a_value]


def sweep(number):
    return settings(
        max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )


@pytest.mark.sweep
@sweep(4000)
@given(mutated_examples())
def test_sweep_of_mutated_examples(text):
    assert_survives(text)


@pytest.mark.sweep
@sweep(3000)
@given(documents, st.sampled_from([True, False, None]), st.booleans())
def test_sweep_of_documents_in_every_style(document, flow, is_complete):
    tree = nested((MINIMAL if is_complete else {}) | document)
    assert_survives(yaml.safe_dump(tree, default_flow_style=flow, allow_unicode=True))


@pytest.mark.sweep
@sweep(1500)
@given(st.lists(st.sampled_from([*NAMES, *CHOICES, *INSERTIONS, " ", "\n", "1", "0.5"]), max_size=40))
def test_sweep_of_words_in_any_order(words):
    assert_survives("".join(words))


@pytest.mark.sweep
@sweep(1500)
@given(st.binary(max_size=400))
def test_sweep_of_bytes(data):
    assert_survives(data)
