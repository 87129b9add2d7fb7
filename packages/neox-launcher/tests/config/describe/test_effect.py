"""`explain` shows where a parameter is declared and read, and why it has no effect."""

import pytest

from neox_config.describe.effect import READERS, declared_in, read_by, reason_without_effect
from neox_config.describe.reference import describe_parameter
from neox_config.schema.config import parameter_named, sections


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("num_layers", None),
        ("gradient_clipping", None),
        ("zero_optimization.sub_group_size", None),
        ("checkpoint.load_universal", "every checkpoint loads under every parallel layout"),
        ("sparse_gradients", "sparse_gradients is no longer supported by DeepSpeed"),
        (
            "compression_training.channel_pruning.different_groups.<group>.modules",
            "compression_training.channel_pruning.shared_parameters.enabled prunes convolutions",
        ),
    ],
)
def test_why_a_parameter_has_no_effect(name, reason):
    found = reason_without_effect(parameter_named(name))
    assert found is None if reason is None else found.startswith(reason)


def test_every_section_names_the_module_that_reads_it():
    assert set(sections()) <= set(READERS)


@pytest.mark.parametrize(
    ("name", "declared", "module"),
    [
        ("rotary_pct", "schema/sections/attention", "neox_config.spec.mixers"),
        ("optimizer.params.lr", "schema/sections/optimizer", "neox_config.spec.read_run"),
        (
            "data_efficiency.data_routing.enabled",
            "extras/data_efficiency/fields",
            "neox_model.extras.token_dropping.layer",
        ),
        ("data_efficiency.enabled", "extras/data_efficiency/fields", "neox_model.train.data.datasets"),
    ],
)
def test_where_a_parameter_is_declared_and_read(name, declared, module):
    parameter = parameter_named(name)
    assert declared_in(parameter) == f"neox_config/{declared}.py"
    assert read_by(parameter) == module


def test_explain_shows_where_a_parameter_is_declared_and_read():
    text = describe_parameter(parameter_named("rotary_pct"))
    assert "  declared in  neox_config/schema/sections/attention.py" in text
    assert "  read by      neox_config.spec.mixers" in text
    assert "no effect" not in text
    text = describe_parameter(parameter_named("checkpoint.load_universal"))
    assert "no effect" in text
    assert "read by" not in text


def test_explain_lists_the_parameters_of_a_block():
    text = describe_parameter(parameter_named("optimizer"))
    assert "  holds        type, params" in text
    assert "read by" not in text
