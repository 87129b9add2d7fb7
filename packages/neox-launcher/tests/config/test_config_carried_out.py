"""`explain` tells of every parameter who carries it out, and of one that nobody does, why."""

import pytest

from neox_launcher.config.carried_out import carried_out_by
from neox_launcher.config.not_yet import NOT_YET
from neox_launcher.config.reference import describe_parameter
from neox_launcher.config.schema import all_parameters, parameter_named

# Checked, and of no other effect: the only engine and the only schedule, permissions, and counts of what is
# listed beside them.
LTD = "data_efficiency.data_routing.random_ltd"
CHECKED_ALONE = {
    "deepspeed",
    "zero_allow_untested_optimizer",
    "elasticity.ignore_non_elastic_batch_info",
    f"{LTD}.total_layer_num",
    f"{LTD}.random_ltd_layer_num",
    f"{LTD}.random_ltd_schedule.schedule_type",
}


@pytest.mark.parametrize(
    ("name", "who"),
    [
        ("num_layers", "neox_model.build"),
        ("gradient_clipping", "DeepSpeed's engine (neox-config show --engine)"),
        ("zero_optimization.sub_group_size", "DeepSpeed's engine (neox-config show --engine)"),
        ("elasticity.micro_batch_sizes", "the batch sizes (neox-config show)"),
        ("checkpoint.load_universal", "nothing: every checkpoint loads under every parallel layout"),
        ("sparse_gradients", "nothing: sparse_gradients is gone from DeepSpeed"),
        (
            "compression_training.channel_pruning.different_groups.<group>.modules",
            "nothing: compression_training.channel_pruning.shared_parameters.enabled prunes convolutions",
        ),
    ],
)
def test_who_carries_a_parameter_out(name, who):
    assert who in carried_out_by(parameter_named(name))


def test_only_what_is_known_is_read_by_rules_alone():
    alone = {
        parameter.name
        for parameter in all_parameters()
        if not parameter.is_block and carried_out_by(parameter) == "rules that check it"
    }
    assert alone == CHECKED_ALONE


def test_what_waits_says_for_what():
    for switch in (name for name in NOT_YET if name.endswith(".enabled")):
        assert carried_out_by(parameter_named(switch)) == f"nothing yet: {switch} is not built"


def test_explain_says_it():
    text = describe_parameter(parameter_named("gradient_clipping"))
    who = "neox_model.train.engine, DeepSpeed's engine (neox-config show --engine)"
    assert f"  carried out  by {who}" in text


def test_explain_lists_what_a_block_holds():
    text = describe_parameter(parameter_named("optimizer"))
    assert "  holds        type, params" in text
    assert "carried out" not in text
