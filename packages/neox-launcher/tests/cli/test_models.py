"""The command `neox-config models`."""

from click.testing import CliRunner

from neox_config import load_config
from neox_config.catalogue import find_model, model_names
from neox_launcher.cli.config import main
from support.refusals import shows

TRAINING = """\
train-iters: 10
train-micro-batch-size-per-gpu: 2
optimizer: {type: Adam, params: {lr: 0.001}}
"""


def run(*arguments):
    return CliRunner().invoke(main, ["models", *arguments], catch_exceptions=False)


def test_all_models_are_listed_with_their_sizes():
    lines = run().stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["name", *model_names()]
    assert lines[5].split() == [
        *("pythia-160m", "Pythia", "162,322,944", "162,322,944"),
        *("12", "768", "12", "2,048", "50,304", "Apache-2.0"),
    ]
    assert lines[0].split()[2:9] == ["parameters", "active", "layers", "width", "heads", "positions", "rows"]


def test_one_model_is_printed_as_a_configuration_file(tmp_path):
    result = run("mistral-7b-v0.1")
    assert shows(result.stdout, "7,241,732,096", "embedding 131,072,000", "attention 1,342,177,280")
    assert "Apache-2.0" in result.stdout
    (tmp_path / "printed.yml").write_text(result.stdout + TRAINING)
    printed = load_config([tmp_path / "printed.yml"])
    assert printed.model == find_model("mistral-7b-v0.1").resolved.config.model
    assert printed.attention.sliding_window_width == 4095


def test_the_active_parameters_of_a_model_with_experts_are_printed():
    (line,) = [line for line in run().stdout.splitlines() if line.startswith("olmoe")]
    assert line.split()[2:4] == ["6,919,161,856", "1,282,017,280"]
    assert shows(run("olmoe-1b-7b").stdout, "experts 6,444,548,096", "1,282,017,280")


def test_an_unknown_model_is_refused_with_the_nearest_name():
    result = run("gpt2-larg")
    assert result.exit_code == 2
    assert shows(result.stderr, "gpt2-larg", "gpt2-large?")
