"""Configuration files and argument names of GPT-NeoX: data/gpt_neox_*.json name their source and commit."""

import json
from pathlib import Path

import pytest

from neox_config import load_config, resolve
from neox_config.errors import ConfigError
from neox_config.estimate.parameters import count_parameters
from neox_config.names import answer, answers
from neox_config.read.load import _all_names
from support.refusals import refused, shows

DATA = Path(__file__).parents[2] / "data"
FILES = json.loads((DATA / "gpt_neox_configurations.json").read_text())["files"]
ARGUMENTS = json.loads((DATA / "gpt_neox_arguments.json").read_text())["arguments"]

MODEL, TRAINING = "125M.yml", "llama/train_config.yml"
# File -> the files that it is given together with; the others are complete.
TOGETHER = {
    "local_setup.yml": [MODEL],
    "local_setup_comet.yml": [MODEL],
    "local_setup_wandb.yml": [MODEL],
    "slurm_local.yml": ["slurm_125M.yml"],
    "eleutherai_cluster.yml": [MODEL],
    "docker/pythia-paths.yml": ["pythia/70M.yml"],
    "cpu_mock_config.yml": [MODEL, "local_setup.yml"],
    "sparse.yml": [MODEL, "local_setup.yml"],
    "text_generation.yml": [MODEL, "local_setup.yml"],
    "prof.yml": [MODEL],
    TRAINING: ["llama/7B.yml"],
    "llama/7B.yml": [TRAINING],
    "llama/13B.yml": [TRAINING],
    "llama/30B.yml": [TRAINING],
    "llama/65B.yml": [TRAINING],
    "llama2/7B.yml": [TRAINING],
    "llama2/13B.yml": [TRAINING],
    "llama2/70B.yml": [TRAINING],
    "llama2/codellama_7B.yml": [TRAINING],
    "llama2/codellama_34B.yml": [TRAINING],
    "mistral/7B.yml": [TRAINING],
}
# File -> the one reason why it is refused.
REFUSED = {
    "1-3B-transformer-engine.yml": "it requires TransformerEngine",
    "bnb_125M.yml": "it requires the optimizers of bitsandbytes",
    **{
        f"mamba/mamba-{size}.yml": "it requires Mamba layers"
        for size in ("130M", "370M", "790M", "1.4B", "2.8B")
    },
    "rwkv/170M.yml": "it requires RWKV layers",
    # The file says 1.0e_8, which is text.
    "gmlp_small.yml": "must be a number",
}
# Parameters of which a part is not built, in these files.

# Billions of parameters with 32,000 entries of vocabulary, as published. (The files of Llama 2 and later do
# not turn off the biases of the feed-forward block, which are 0.01 %.)
SIZES = {
    "llama/7B.yml": 6.74,
    "llama/13B.yml": 13.02,
    "llama/30B.yml": 32.53,
    "llama/65B.yml": 65.29,
    "llama2/7B.yml": 6.74,
    "llama2/13B.yml": 13.02,
    "llama2/70B.yml": 68.98,
    "llama2/codellama_7B.yml": 6.74,
    "llama2/codellama_34B.yml": 33.74,
    "llemma/7B.yml": 6.74,
    "llemma/34B.yml": 33.74,
}


def text_of(name):
    """Return a file of GPT-NeoX with one name per line."""
    rows = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in FILES[name].items())
    return "{\n" + ",\n".join(rows) + "\n}\n"


@pytest.fixture
def written(tmp_path):
    """Return a function that writes files of GPT-NeoX and returns their paths."""

    def write(*names):
        paths = []
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text_of(name))
            paths.append(path)
        return paths

    return write


def test_there_are_59_files_and_318_names():
    assert len(FILES) == 59
    assert len(ARGUMENTS) == 318
    assert len(FILES) - len(REFUSED) >= 48


@pytest.mark.parametrize("name", sorted(FILES.keys() - REFUSED.keys()))
def test_a_file_passes_with_those_it_is_given_with(written, name):
    assert load_config(written(name, *TOGETHER.get(name, [])))


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_a_file_for_another_model_is_refused_by_one_sentence(written, name, reason):
    with pytest.raises(ConfigError) as refused:
        load_config(written(name))
    (problem,) = refused.value.problems
    assert reason in problem.what
    assert problem.place.line is not None


@pytest.mark.parametrize(("name", "billions"), SIZES.items())
def test_llama_models_have_the_published_number_of_parameters(written, name, billions):
    assert parameters_of(written, name) / 1e9 == pytest.approx(billions, abs=0.01)


def test_mistral_has_the_width_that_gpt_neox_gives_its_file(written):
    """GPT-NeoX takes two thirds of 14,336 for both matrices together; the published model has 14,336 each."""
    assert round(parameters_of(written, "mistral/7B.yml") / 1e9, 2) == 3.48
    assert (
        round(parameters_of(written, "mistral/7B.yml", "mlp_width=14336", "intermediate_size=null") / 1e9, 2)
        == 7.24
    )


def parameters_of(written, name, *overrides):
    """Return the number of parameters of a file's model with a vocabulary of 32,000."""
    config = load_config(written(name, *TOGETHER.get(name, [])), overrides=overrides)
    resolved = resolve(config, devices=max(1, config.parallelism.model_parallel_size))
    entries = resolved.model.embedding.entries(32_000)
    return sum(count_parameters(resolved.model, entries).values())


def outcome(load, name, value):
    """Return "accepted", or the problems that name the argument."""
    try:
        load("", f"{name}={json.dumps(value)}")
    except ConfigError as error:
        return error.problems
    return "accepted"


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_is_accepted_with_its_default(load, name):
    default = ARGUMENTS[name]["default"]
    if name in DEFAULTS:
        default = DEFAULTS[name]
    assert outcome(load, name, default) == "accepted"


# Their defaults are null or other values that a configuration cannot have there.
DEFAULTS = {
    # Without a value there is no number of layers (of iterations, and so on); conftest's.
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "train_iters": 10,
    "train_micro_batch_size_per_gpu": 2,
    "batch_size": 2,
    "lr": 0.001,
    "optimizer_type": "adam",
    "optimizer": {"type": "Adam"},
}


OTHER_VALUES = {"bool": lambda default: not default, "int": lambda default: (default or 0) + 2}


@pytest.mark.parametrize("name", sorted(answers("features")))
def test_every_name_of_a_missing_feature_is_refused_by_its_name(load, name):
    kind, default = ARGUMENTS[name]["type"], ARGUMENTS[name]["default"]
    value = (
        OTHER_VALUES[kind](default) if kind in OTHER_VALUES else {"list": ["x"], "float": 0.7}.get(kind, "x")
    )
    (problem,) = outcome(load, name, value)
    assert problem.what == answer(name).sentence
    assert problem.place.spelling == f"--set {name}"
    assert "did you mean" not in problem.remedy


@pytest.mark.parametrize("name", ARGUMENTS)
def test_no_argument_is_taken_for_a_misspelling(name):
    assert name in _all_names()


def test_all_names_of_a_feature_are_one_problem(load):
    with pytest.raises(ConfigError) as refused:
        load("te_mha: true\nte_layernorm_mlp: true\nnorm: te_rmsnorm\nuse_bnb_optimizer: true")
    te, bits = refused.value.problems
    assert te.remedy == "remove it; the same applies to te_layernorm_mlp, norm"
    assert bits.name == "use_bnb_optimizer"


def test_an_override_turns_a_feature_off(load):
    assert load("moe_num_experts: 8", "moe_num_experts=1").model.num_layers == 4


def test_a_block_that_is_off_is_accepted(load):
    notes = load("soft_prompt_tuning: {enabled: false, num_tokens: 10}").notices
    assert [note.name for note in notes] == ["soft_prompt_tuning.enabled", "soft_prompt_tuning.num_tokens"]
    with refused(ConfigError, "soft prompt tuning"):
        load("soft_prompt_tuning: {enabled: true, num_tokens: 10}")


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("checkpoint-factor: 100", "save_interval", 100),
        ("checkpoint_factor: 100.0\ncheckpoint_scale: linear", "save_interval", 100),
        ("checkpoint_factor: 1.5\ncheckpoint_scale: log", "save_growth", 1.5),
        ("checkpoint_factor: 2\ncheckpoint_scale: log", "save_interval", None),
        ("attention-config: [[[flash, local], 2]]", "attention_config", ((("global", "local"), 2),)),
        ("tokenizer_type: SPMTokenizer", "tokenizer_type", "SentencePieceTokenizer"),
        ("deepspeed_slurm: true", "launcher", "slurm"),
        ("deepspeed_slurm: false", "launcher", "pdsh"),
        ("bf16: {bf16: true, loss_scale: 0, hysteresis: 2}", "bf16.enabled", True),
        ("use_comet: true\ncomet_project: x", "comet.project", "x"),
        ("use_comet: true\ncomet_tags: [a, b]", "comet.tags", ("a", "b")),
        ("use_comet: true\ncomet_others: {c: 1}", "comet.others", {"c": 1}),
        ("use_comet: null", "comet.enabled", False),
        ("deepspeed_extra_args: {comms_logger: {verbose: true}}", "comms_logger.verbose", True),
        ("deepspeed_extra_args: {zero_optimization: true}", "zero_optimization.stage", 1),
        ("deepspeed_extra_args: {gas: 4}", "gradient_accumulation_steps", 4),
    ],
)
def test_names_with_an_equal_are_carried_out(load, text, name, value):
    assert load(text).value_of(name) == value


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("checkpoint_factor: 1.5", "must be a whole number of iterations unless checkpoint-scale is log"),
        ("checkpoint_factor: x", "must be a number"),
        ("checkpoint_scale: log", "requires checkpoint-factor"),
        ("checkpoint_scale: cubic", "must be linear or log"),
        ("checkpoint_factor: 1\ncheckpoint_scale: log", "must be at least 1.01"),
        ("train_lable_data_paths: [x]", "did you mean train-label-data-paths?"),
        ("train_epochs: 2", "and train-iters cannot both be set"),
        ("output_layer_parallelism: row", "is split over the hidden size"),
    ],
)
def test_wrong_values_are_refused(load, text, sentence):
    with pytest.raises(ConfigError) as refused:
        load(text)
    (problem,) = refused.value.problems
    assert sentence in f"{problem.what}\n{problem.remedy}"


@pytest.mark.parametrize(
    ("text", "width"),
    [
        ("", 256),
        ("activation: swiglu", 170),
        ("activation: swiglu\nmlp-multiple-of: 64", 192),
        ("mlp-multiple-of: 100", 300),
        ("activation: swiglu\nintermediate-size: 300", 100),
        ("activation: swiglu\nintermediate-size: 32768\nmlp-multiple-of: 256", 11_008),
        ("activation: swiglu\nexpansion-factor: 6", 128),
        ("intermediate-size: 300", 300),
        ("expansion-factor: 1.5", 96),
        ("activation: swiglu\nmlp-width: 300\nmlp-multiple-of: 64", 300),
    ],
)
def test_the_inner_width_is_that_of_gpt_neox(load, text, width):
    """Compare with the widths of both matrices by GPT-NeoX's formula; the last is exact."""
    config = load(text)
    assert resolve(config, devices=1).model.layers[0].channel.width == width


def test_a_note_gives_both_widths_of_a_gated_block(load):
    (note,) = load("activation: swiglu\nintermediate-size: 32768\nmlp-multiple-of: 256").notices
    assert (note.name, note.value) == ("intermediate_size", "32768")
    assert shows(note.what, "MLP", "of 11,008")
    assert "22,016" in note.what
    assert "mlp-width: 11008" in note.remedy
    assert load("intermediate-size: 300").notices == ()
