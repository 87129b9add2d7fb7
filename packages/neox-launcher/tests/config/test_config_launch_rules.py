"""Every rule about launches: an example that breaks it, and one near it that does not."""

import pytest

from neox_launcher.config.rules import RULES
from neox_launcher.errors import ConfigError

# rule -> (text that breaks it, where, part of the sentence, text that does not)
EXAMPLES = {
    "one_choice_of_slots": ("include: a\nexclude: b", "exclude", "excludes include", "include: a"),
    "slots_are_named_or_counted": (
        "exclude: worker-1:0\nnum-gpus: 2",
        "num_gpus",
        "counts slots from 0, and exclude names them",
        "exclude: worker-1:0\nnum-gpus: -1\nnum-nodes: 2",
    ),
    "counts_of_devices_are_positive": (
        "num-gpus: 0",
        "num_gpus",
        "leaves nothing to train on",
        "num-gpus: -1",
    ),
    "mpi_starts_what_learns_from_mpi": (
        "deepspeed-mpi: true\nlauncher: slurm",
        "deepspeed_mpi",
        "launcher: slurm is none\nset launcher: openmpi, mvapich, mpich",
        "deepspeed-mpi: true\nlauncher: mpich",
    ),
    "launcher_arguments_are_words": (
        'launcher-args: "-x \'a"',
        "launcher_args",
        "cannot be split into words (No closing quotation)",
        "launcher-args: \"-x 'a b'\"",
    ),
}


def test_every_rule_has_its_examples():
    assert {rule.__name__ for rule in RULES if rule.__module__.endswith(".launch")} == set(EXAMPLES)


@pytest.mark.parametrize("rule", EXAMPLES)
def test_a_rule_refuses_its_example_alone(load, rule):
    breaking, name, sentence, _ = EXAMPLES[rule]
    with pytest.raises(ConfigError) as found:
        load(breaking)
    (problem,) = found.value.problems
    assert problem.name == name
    assert sentence in f"{problem.what}\n{problem.remedy}"


@pytest.mark.parametrize("rule", EXAMPLES)
def test_a_rule_lets_its_neighbour_pass(load, rule):
    assert load(EXAMPLES[rule][3]).model.num_layers == 4


def test_mpi_without_a_launcher_is_no_contradiction(load):
    assert load("deepspeed-mpi: true").launch.deepspeed_mpi
