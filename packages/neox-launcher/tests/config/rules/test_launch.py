"""Every rule about launches: an example that breaks it, and one near it that does not."""

import pytest

from neox_config.errors import ConfigError
from neox_config.rules import RULES
from support.refusals import refused, shows

# rule -> (text that breaks it, where, numbers in the message, text that does not)
EXAMPLES = {
    "slots_are_named_or_counted": ("exclude: worker-1:0\nnum-gpus: 2", "num_gpus", [],
        "exclude: worker-1:0\nnum-gpus: -1\nnum-nodes: 2"),
    "counts_of_devices_are_positive": ("num-gpus: 0", "num_gpus", ["0"], "num-gpus: -1"),
    "mpi_starts_what_learns_from_mpi": ("deepspeed-mpi: true\nlauncher: slurm", "deepspeed_mpi", [],
        "deepspeed-mpi: true\nlauncher: mpich"),
    "launcher_arguments_are_words": ('launcher-args: "-x \'a"', "launcher_args", [],
        "launcher-args: \"-x 'a b'\""),
    "the_address_of_the_launcher_is_one": ("launcher-address: 10.0.0.1:29400", "launcher_address",
        ["10.0.0.1", "29400"], "launcher-address: login-1.cluster"),
}  # fmt: skip


def test_every_rule_has_its_examples():
    assert {rule.__name__ for rule in RULES if rule.__module__.endswith(".launch")} == set(EXAMPLES)


@pytest.mark.parametrize("rule", EXAMPLES)
def test_a_rule_refuses_its_example_alone(load, rule):
    breaking, name, numbers, _ = EXAMPLES[rule]
    with pytest.raises(ConfigError) as found:
        load(breaking)
    (problem,) = found.value.problems
    assert (problem.name, problem.code) == (name, f"launch.{rule}")
    assert shows(problem.what, *numbers)


@pytest.mark.parametrize("rule", EXAMPLES)
def test_a_rule_accepts_a_similar_configuration(load, rule):
    assert load(EXAMPLES[rule][3]).model.num_layers == 4


def test_mpi_without_a_launcher_is_no_contradiction(load):
    assert load("deepspeed-mpi: true").launch.deepspeed_mpi


@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::9", "::ffff:10.0.0.1", "login-1", "a_b.c"])
def test_the_launcher_may_have_any_address(load, address):
    assert load(f'launcher-address: "{address}"').launch.launcher_address == address


@pytest.mark.parametrize(
    "address",
    ["", "-oProxyCommand=x", "$(reboot)", "a b", "a;b", "a,b", "http://a", "[::1]", "a%n", "é"],
)
def test_other_text_is_no_address_of_the_launcher(load, address):
    with refused(ConfigError, "neither a host"):
        load(f'launcher-address: "{address}"')
