"""The models of the catalogue: their files, and their number of parameters."""

import re
from pathlib import Path

import pytest

from neox_config import load_config
from neox_config.catalogue import PUBLISHED, find_model, model_names
from neox_config.errors import ConfigError
from neox_config.estimate.parameters import active_parameters
from support.refusals import refused

# What a user's file of data and training contains.
TRAINING = """\
seq-length: 1024
train-iters: 10
train-micro-batch-size-per-gpu: 2
optimizer: {type: Adam, params: {lr: 0.001}}
"""
# Columns "non-embedding params" of the model cards of Pythia: without both matrices of the vocabulary.
OUTSIDE_OF_VOCABULARY = {
    "pythia-14m": 1_189_888,
    "pythia-31m": 4_739_072,
    "pythia-70m": 18_915_328,
    "pythia-160m": 85_056_000,
    "pythia-410m": 302_311_424,
    "pythia-1b": 805_736_448,
    "pythia-1.4b": 1_208_602_624,
    "pythia-2.8b": 2_517_652_480,
    "pythia-6.9b": 6_444_163_072,
    "pythia-12b": 11_327_027_200,
}
# Entries of the published tokenizers whose padding the files state.
ENTRIES = {
    "gpt-neox-20b": 50_277,
    **dict.fromkeys(OUTSIDE_OF_VOCABULARY, 50_277),
    **{name: 100_278 for name in model_names() if name.startswith("olmo-")},
    **{name: 32_011 for name in model_names() if name.startswith("phi-3")},
    **{name: 50_265 for name in model_names() if name.startswith("opt-")},
}


@pytest.mark.parametrize("name", model_names())
def test_a_model_has_its_published_number_of_parameters(name):
    model = find_model(name)
    assert sum(model.count().values()) == PUBLISHED[name].parameters


@pytest.mark.parametrize("name", model_names())
def test_a_model_has_its_published_number_of_parameters_that_a_token_uses(name):
    model = find_model(name)
    spec = model.resolved.model
    assert active_parameters(spec, spec.embedding.entries(PUBLISHED[name].rows)) == PUBLISHED[name].used


# What the models' reports and cards state, in billions.
STATED = {
    "mixtral-8x7b-v0.1": (46.7, 12.9),
    "mixtral-8x22b-v0.1": (141, 39),
    "olmoe-1b-7b": (6.9, 1.3),
    "qwen1.5-moe-a2.7b": (14.3, 2.7),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    # That of gpt-oss states 3.6 and 5.1 without the embedding of 0.58.
    "gpt-oss-20b": (20.9, 3.6 + 0.58),
    "gpt-oss-120b": (116.8, 5.1 + 0.58),
}


def test_models_with_experts_have_the_rounded_numbers_of_their_reports():
    found = {
        name: (published.parameters, published.active)
        for name, published in PUBLISHED.items()
        if published.active is not None
    }
    assert found.keys() == STATED.keys()
    for name, numbers in found.items():
        for number, stated in zip(numbers, STATED[name], strict=True):
            assert number / 1e9 == pytest.approx(stated, rel=0.02), name


@pytest.mark.parametrize(("name", "expected"), OUTSIDE_OF_VOCABULARY.items())
def test_a_pythia_model_has_its_published_number_outside_of_the_vocabulary(name, expected):
    parts = find_model(name).count()
    assert sum(parts.values()) - parts["embedding"] - parts["head"] == expected


@pytest.mark.parametrize(("name", "entries"), ENTRIES.items())
def test_the_entries_of_the_published_tokenizer_are_padded_to_the_published_rows(name, entries):
    model = find_model(name)
    assert model.count(rows=entries) == model.count()


@pytest.mark.parametrize("name", model_names())
def test_a_file_merges_with_a_training_and_states_its_size(name, tmp_path):
    (tmp_path / "training.yml").write_text(TRAINING)
    model = find_model(name)
    config = load_config([model.path, tmp_path / "training.yml"])
    assert {note.name for note in config.notices} <= {"max_position_embeddings"}
    assert config.model.seq_length == 1024
    published = PUBLISHED[name]
    first = model.text.splitlines()[0]
    assert first.endswith(
        f": {published.parameters:,} parameters with its vocabulary of {published.rows:,} rows"
    )
    assert f"--config configs/models/{name}.yml" in model.text
    if published.active is not None:
        assert f" {published.active:,} " in model.text.splitlines()[1]


@pytest.mark.parametrize("name", model_names())
def test_a_file_contains_the_architecture_only(name):
    model = find_model(name)
    given = set(re.findall(r"^([a-z-]+):", model.text, re.MULTILINE))
    config = model.resolved.config
    parts = (config.model, config.attention, config.experts)
    assert {each.replace("-", "_") for each in given} <= {
        name for part in parts for name in type(part).model_fields
    } - {
        *("init_method", "output_layer_init_method", "hidden_dropout", "attention_dropout", "seq_length"),
        *("moe_balance_loss", "moe_router_z_loss", "moe_jitter_eps", "moe_expert_bias_rate"),
    }


def test_every_file_is_listed_and_every_listed_model_has_a_file():
    files = {path.stem for path in find_model("gpt2").path.parent.iterdir()}
    assert files == set(PUBLISHED)


def test_the_files_are_those_of_the_configs_folder():
    linked = Path(__file__).parents[5] / "configs" / "models"
    if not linked.exists():
        pytest.skip("the folder configs is not next to this package")
    assert linked.resolve() == find_model("gpt2").path.parent.resolve()


def test_an_unknown_name_gets_the_nearest_one_or_all_of_them():
    with refused(ConfigError, "you mean pythia-160m"):
        find_model("pythia160m")
    with refused(ConfigError, "gpt-neox-20b, pythia-14m", "qwen2-72b"):
        find_model("?")
