"""The specification of the model: written as parameters and read again, flat, and drawn at random."""

import json
import random
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from neox_config import ConfigError, NeoXConfig, Text, load_config
from neox_config.facts.activations import ACTIVATION_FACTS
from neox_config.facts.adapters import ADAPTED
from neox_config.facts.attention import ATTENTION_FACTS
from neox_config.facts.norms import NORM_FACTS
from neox_config.schema.config import all_parameters
from neox_config.spec.model import ModelSpec, Rotary, Window
from neox_config.spec.read_model import read_model
from neox_config.spec.run import RunSpec
from neox_config.spec.update import DataSpec, UpdateSpec
from neox_config.spec.values import ABSENT, Each, changes, flat, parameters_of, unflat
from neox_config.spec.write_model import settings_of
from support.refusals import refused

CONFIGS = [path for path in sorted(Path("configs").glob("*.yml")) if "num-layers" in path.read_text()]
RUN = {
    "train-micro-batch-size-per-gpu": 1,
    "train-iters": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1.0e-3}},
}
SMALL = {
    "num-layers": 1,
    "num-attention-heads": 2,
    "hidden-size": 8,
    "max-position-embeddings": 32,
    "seq-length": 32,
}


def loaded(settings: dict[str, object]) -> NeoXConfig:
    return load_config([], texts=[Text(json.dumps(RUN | settings), name="drawn.yml")])


def drawn(seed: int) -> dict[str, object]:
    """Return the parameters of a random model."""
    draw = random.Random(seed)
    heads, layers = draw.choice((1, 2, 4, 8)), draw.randint(1, 6)
    positions = 16 * draw.randint(2, 6)
    settings: dict[str, object] = {
        "num-layers": layers,
        "num-attention-heads": heads,
        "hidden-size": heads * draw.choice((4, 8, 16)),
        "max-position-embeddings": positions,
        "seq-length": positions,
        "norm": draw.choice(list(NORM_FACTS)),
        "activation": draw.choice(list(ACTIVATION_FACTS)),
        "pos-emb": draw.choice(("learned", "rotary", "sinusoidal", "rpe", "alibi", "none")),
        "objective": draw.choice(("causal", "causal", "masked")),
    }
    options: dict[str, object] = {
        "num-kv-heads": draw.choice([each for each in (1, 2, 4, 8) if heads % each == 0]),
        "head-dim": draw.choice((2, 4, 12)),
        "attention-scale": draw.choice((0.125, 0.5)),
        "attention-softcap": 50.0,
        "attention-sinks": True,
        "attention-gate": draw.choice(("head", "element")),
        "layernorm-epsilon": 1e-6,
        "rms-norm-epsilon": 1e-5,
        "openai-gelu": True,
        "mlp-width": draw.randint(1, 99),
        "intermediate-size": draw.randint(8, 99),
        "expansion-factor": draw.choice((1.5, 3.0)),
        "use-bias-in-norms": False,
        "use-bias-in-attn-linear": draw.choice((True, False)),
        "use-bias-in-qkv": draw.choice((True, False)),
        "use-bias-in-mlp": False,
        "apply-residual-connection-post-layernorm": True,
        "gpt-j-residual": True,
        "gpt-j-tied": True,
        "norm-placement": draw.choice(("after", "both")),
        "norm-zero-centered": True,
        "qk-norm": draw.choice(("head", "width")),
        "use-qk-layernorm": True,
        "no-weight-tying": True,
        "num-unique-layers": draw.choice([each for each in range(1, layers + 1) if layers % each == 0]),
        "param-sharing-style": draw.choice(("grouped", "spaced")),
        "make-vocab-size-divisible-by": draw.choice((1, 64)),
        "embedding-scale": draw.choice((0.5, 3.0)),
        "logit-scale": draw.choice((0.5, 3.0)),
        "logit-softcap": draw.choice((5.0, 30.0)),
        "glu-limit": 7.0,
        "glu-alpha": 1.702,
        "glu-up-offset": 1.0,
        "gmlp-attn-dim": draw.choice((8, None)),
        "attention-config": [draw.choice(list(ATTENTION_FACTS)) for _ in range(layers)],
        "sliding-window-width": draw.randint(1, 99),
        "rpe-num-buckets": 2 * draw.randint(1, 9),
        "rpe-max-distance": draw.randint(40, 99),
        "rpe-causal": True,
        "opt-pos-emb-offset": 2,
        "rotary-pct": draw.choice((0.25, 0.5)),
        "rotary-emb-base": 500,
        "rotary-scaling": draw.choice(
            (
                {"type": "linear", "factor": 2.0},
                {"type": "llama3", "factor": 4.0, "original-max-position-embeddings": 16},
                {"type": "yarn", "factor": 4.0, "truncate": False},
            )
        ),
        "apply-query-key-layer-scaling": True,
        "lora-rank": draw.randint(1, 4),
        "lora-target-modules": draw.sample(ADAPTED, draw.randint(1, len(ADAPTED))),
        "sparsity-config": {
            "block": draw.choice((8, 16)),
            "num-local-blocks": draw.choice((1, 2, 4)),
            "num-random-blocks": draw.choice((0, 1)),
            "num-sliding-window-blocks": draw.choice((1, 3)),
            "attention": draw.choice(("unidirectional", "bidirectional")),
            "horizontal-global-attention": draw.choice((True, False)),
            "different-layout-per-head": draw.choice((True, False)),
        },
    }
    settings |= {name: value for name, value in options.items() if draw.random() < 0.35}
    if draw.random() < 0.35:
        kinds = {
            f"kind_{number}": drawn_kind(draw, rotates=settings["pos-emb"] == "rotary") for number in (1, 2)
        }
        types = [*kinds, *list(ATTENTION_FACTS)[: draw.choice((1, 1, len(ATTENTION_FACTS)))]]
        names = [draw.choice(types) for _ in range(layers)]
        settings["attention-config"] = names
        settings["attention-kinds"] = {name: kind for name, kind in kinds.items() if name in names}
    return settings


def drawn_kind(draw: random.Random, *, rotates: bool) -> dict[str, object]:
    """Return the settings of a random kind of attention."""
    found: dict[str, object] = {"sliding-window-width": draw.randint(1, 40)} if draw.random() < 0.5 else {}
    if rotates and draw.random() < 0.3:
        found["pos-emb"] = "none"
    elif rotates:
        scaling = {"type": draw.choice(("none", "linear", "yarn")), "factor": 3.0}
        found |= {"rotary-emb-base": 300, "rotary-scaling": scaling} if draw.random() < 0.6 else {}
    return found


def drawn_models(number: int) -> list[tuple[dict[str, object], NeoXConfig]]:
    """Return random models that the rules allow."""
    found = list[tuple[dict[str, object], NeoXConfig]]()
    seed = 0
    while len(found) < number:
        settings = drawn(seed)
        seed += 1
        if "lora-rank" in settings:
            settings["lora-base"] = "base"
        try:
            found.append((settings, loaded(settings)))
        except ConfigError:
            assert seed < 20 * number, "the rules refuse nearly all that is drawn"
    return found


def written_and_read(spec: ModelSpec) -> ModelSpec:
    settings = settings_of(spec)
    if spec.adapters is not None:
        settings["lora-base"] = "base"
    return read_model(loaded(settings))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_model_of_a_configuration_is_written_and_read(path: Path) -> None:
    spec = read_model(load_config([path]))

    assert written_and_read(spec) == spec


@pytest.mark.parametrize("count", [100, pytest.param(1_000, marks=pytest.mark.slow)])
def test_drawn_models_are_written_and_read(count: int) -> None:
    for settings, config in drawn_models(count):
        spec = read_model(config)
        read = written_and_read(spec)
        assert changes(spec, read) == {}, settings
        # Where kinds of attention are written, a global layer with the window of some may be named, too.
        assert read.kinds == spec.kinds or "attention-kinds" in settings, settings


def test_drawn_models_are_flat_json_and_back() -> None:
    for settings, config in drawn_models(100):
        spec = read_model(config)
        assert unflat(ModelSpec, flat(spec)) == spec, settings


def test_a_path_without_a_value_has_its_default() -> None:
    spec = read_model(loaded(SMALL | {"pos-emb": "rotary"}))
    values = flat(spec)
    del values["layers.mixer.position.scaling"]

    assert unflat(ModelSpec, values) == spec
    del values["layers.mixer.position.base"]
    with refused(KeyError, "layers.mixer.position.base"):
        unflat(ModelSpec, values)


def test_a_path_has_one_value_or_one_per_layer() -> None:
    settings = SMALL | {"num-layers": 3}
    kinds = ["global", "gmlp", "local"]
    spec = read_model(
        loaded(settings | {"seq-length": 32, "attention-config": kinds, "sparsity-config": {"block": 8}})
    )

    values = flat(spec)

    assert values["width"] == 8
    assert values["layers"] == 3
    assert values["layers.mixer"] == Each(("Attention", "SpatialMLP", "Attention"))
    assert values["layers.mixer.heads"] == Each((2, ABSENT, 2))
    assert values["layers.mixer.pattern"] == Each((None, ABSENT, "Window"))
    assert values["layers.norm.kind"] == "layernorm"


def test_changes_are_paths_with_both_values_and_lead_to_parameters() -> None:
    spec = read_model(load_config(["configs/125M.yml"]))
    first = replace(spec.layers[0], channel=replace(spec.layers[0].channel, width=7))
    other = replace(spec, width=1, layers=(first, *spec.layers[1:]))

    found = changes(spec, other)

    assert found == {
        "width": (768, 1),
        "layers.channel.width": (3072, Each((7, *(3072,) * (len(spec.layers) - 1)))),
    }
    assert parameters_of(ModelSpec, "layers.channel.width")[0] == "mlp_width"


@pytest.mark.parametrize("kind", [ModelSpec, RunSpec, UpdateSpec, DataSpec])
def test_fields_name_declared_parameters(kind: type) -> None:
    """Messages name these parameters, with the file and line where they were given."""
    names = {
        name
        for each in _classes_in(kind)
        for field in fields(each)
        for name in field.metadata.get("parameters", ())
    }
    declared = {parameter.name for parameter in all_parameters()}

    assert names
    assert names <= declared, names - declared


def _classes_in(kind: type) -> set[type]:
    """Return the classes of a specification and of all values in it."""
    found = {kind}
    for hint in get_type_hints(kind).values():
        for each in (hint, *get_args(hint)):
            if isinstance(each, type) and is_dataclass(each):
                found |= _classes_in(each)
    return found


def test_the_name_of_an_attention_type_is_not_compared() -> None:
    """Local layers with blocks of one token compute what a sliding window of global layers computes."""
    windows = {"sliding-window-width": 4}
    blocks = {"attention-config": ["local"], "sparsity-config": {"block": 1, "num-local-blocks": 8}}

    one, other = read_model(loaded(SMALL | windows)), read_model(loaded(SMALL | blocks))

    assert (one, changes(one, other)) == (other, {})
    assert (one.kinds, other.kinds) == (("global",), ("local",))
    assert one.layers[0].mixer.pattern == Window(block=1, before=4)


ROTARY = SMALL | {"pos-emb": "rotary", "rotary-emb-base": 500}
KINDS = {
    "sliding": {"sliding-window-width": 4},
    "full": {"rotary-emb-base": 9000, "rotary-scaling": {"type": "linear", "factor": 8.0}},
    "nope": {"pos-emb": "none"},
}
NAMES = ["sliding", "sliding", "full", "sliding", "nope", "global"]


def test_a_kind_overrides_what_it_gives_and_no_more() -> None:
    settings = ROTARY | {"num-layers": 6, "attention-config": NAMES, "attention-kinds": KINDS}
    spec = read_model(loaded(settings))
    plain, scaled = Rotary(fraction=1.0, base=500), (("type", "linear"), ("factor", 8.0))

    found = [(layer.mixer.kind, layer.mixer.pattern, layer.mixer.position) for layer in spec.layers]

    sliding = ("sliding", Window(block=1, before=4), plain)
    assert found == [
        sliding,
        sliding,
        ("full", None, replace(plain, base=9000, scaling=scaled)),
        sliding,
        ("nope", None, None),
        ("global", None, plain),
    ]


def test_layers_that_differ_are_written_as_kinds_with_readable_names() -> None:
    """Models of other programs have no names of kinds."""
    settings = ROTARY | {"num-layers": 6, "attention-config": NAMES, "attention-kinds": KINDS}
    spec = read_model(loaded(settings))
    unnamed = [replace(layer, mixer=replace(layer.mixer, kind="global")) for layer in spec.layers]
    written = settings_of(replace(spec, layers=tuple(unnamed)))

    assert written["attention-config"] == NAMES
    assert written["attention-kinds"] == KINDS
    assert "sliding-window-width" not in written
    # The most common window is that of the model.
    windows = [replace(unnamed[0].mixer, pattern=Window(block=1, before=before)) for before in (9, 4, 9, 2)]
    several = settings_of(replace(spec, layers=tuple(replace(unnamed[0], mixer=mixer) for mixer in windows)))
    assert several["sliding-window-width"] == 9
    assert several["attention-config"] == ["global", "sliding", "global", "sliding_2"]
    assert several["attention-kinds"] == {
        "sliding": {"sliding-window-width": 4},
        "sliding_2": {"sliding-window-width": 2},
    }


def test_layers_that_rotate_different_shares_cannot_be_written() -> None:
    spec = read_model(loaded(ROTARY | {"num-layers": 2}))
    other = replace(spec.layers[1].mixer, position=replace(spec.layers[1].mixer.position, fraction=0.5))
    layers = (spec.layers[0], replace(spec.layers[1], mixer=other))

    with refused(ValueError, "rotary-pct"):
        settings_of(replace(spec, layers=layers))
