"""Names from elsewhere have one answer each."""

from collections import Counter

import pytest

from neox_config.names import answer, answers
from neox_config.schema.config import field_named


@pytest.mark.parametrize(
    ("name", "kind", "parameters"),
    [
        ("lr", "shorthands", ("optimizer.params.lr",)),
        ("bfloat16.enabled", "shorthands", ("bf16.enabled",)),
        ("use_comet.x", "shorthands", ("comet.enabled.x",)),
        ("world_size", "computed", ()),
        ("DDP_impl", "retired", ()),
        ("soft_prompt_tuning.enabled", "features", ()),
        ("max_new_tokens", "foreign", ("maximum_tokens",)),
        ("Flash-Attention", "foreign", ("attention_config",)),
        ("mlp_type", "foreign", ()),
    ],
)
def test_a_name_in_a_file_has_the_answer_of_its_row(name, kind, parameters):
    found = answer(name)
    assert (found.kind, found.parameters) == (kind, parameters)
    assert found.parameters or found.sentence


def test_an_unknown_name_has_no_answer():
    assert [answer(name) for name in ("zzzz", "", "num_layers.x")] == [None] * 3


def test_a_value_means_another_one_or_a_feature():
    assert answer("precision", "value", "BF16").off == "bfloat16"
    requested = answer("attention_config", "value", "mamba")
    assert requested.sentence == answer("mamba_selective_scan_fusion").sentence
    assert answer("precision", "value", "int3") is None


def test_options_and_commands_have_rows_of_their_own():
    assert answer("H", "option").sentence == "use --hostfile FILE"
    assert answer("learning_rate", "option").parameters == ("optimizer.params.lr",)
    assert answer("generate.py", "command").sentence == "use neox-launch generate FILE"
    assert answer("lr", "command") is None


def test_the_value_that_leaves_a_feature_off_is_known():
    assert (answer("te_fp8_amax_history_len").off, answer("te_fp8_format").off) == (1, "hybrid")


def test_no_name_is_in_two_rows_and_none_is_a_parameter():
    sections = ("shorthands", "computed", "retired", "features", "foreign")
    keys = Counter(name.replace(" ", "_") for section in sections for name in answers(section))
    assert [name for name, count in keys.items() if count > 1] == []
    assert [name for name in keys if field_named(name) is not None] == []
