"""Every parameter, of every block, is read by a module that uses its value; or it is known why not."""

import ast

from neox_config.describe.effect import READERS, reason_without_effect
from neox_config.schema.config import all_parameters
from support.readers import HANDED_ON, read_by
from support.sources import sources

# Checked by rules, and of no other effect.
# log_interval follows from steps_per_print.
CHECKED_BY_RULES_ALONE = {
    "attention_softmax_in_fp32",
    "steps_per_print",
    "zero_allow_untested_optimizer",
}


def test_every_parameter_is_read():
    unread = {
        parameter.name
        for parameter in all_parameters()
        if not parameter.is_block
        and reason_without_effect(parameter) is None
        and not parameter.name.startswith(tuple(HANDED_ON))
        and not read_by(parameter.name)
    }
    assert unread == CHECKED_BY_RULES_ALONE


def test_the_module_that_explain_names_exists_and_reads_the_section():
    trees = {source.module: source.tree for source in sources()}
    for section, module in READERS.items():
        nodes, name = list(ast.walk(trees[module])), section.rpartition(".")[2]
        read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        taken = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert name in read or f"{name.title().replace('_', '')}Section" in taken, (
            f"{module} does not read {section}"
        )


def test_a_reader_is_found_by_section_and_name():
    assert "neox_config.spec.positions" in read_by("rotary_pct")
    assert "neox_config.derive.learning_rate" in read_by("optimizer.params.lr")


def test_string_method_is_not_a_reader():
    """`split` is a parameter, too."""
    assert "neox_config.read.reading" not in read_by("split")
    assert "neox_model.train.data.datasets" in read_by("split")


def test_variable_of_the_same_name_is_not_a_reader():
    assert "neox_config.spec.resolve" not in read_by("split")
    assert "neox_launcher.plan.plan" not in read_by("optimizer.type")
    assert "neox_model.assembly.optimizer" in read_by("optimizer.type")


def test_parameter_without_a_reader_is_read_with_its_block():
    assert read_by("comet.api_key") == read_by("comet") != []


def test_block_passed_whole_is_in_the_table_of_such_blocks():
    assert read_by("aio.queue_depth") == []
    assert "neox_config.spec.engine_json" in read_by("zero_optimization.stage")
