import json
import math

import pytest

from neox_config.finite_json import dumps, loads

VALUE = {
    "iteration": 3,
    "loss/train": math.nan,
    "nested": {"a": [1.5, -math.inf, {"b": math.inf}], "c": None, "d": True},
}


def test_numbers_that_are_not_finite_are_null_with_a_flag_and_come_back():
    text = dumps(VALUE)
    assert json.loads(text, parse_constant=pytest.fail) == {
        "iteration": 3,
        "loss/train": None,
        "nested": {"a": [1.5, None, {"b": None}], "c": None, "d": True},
        "nonfinite": {"loss/train": "nan", "nested": {"a": {"1": "-inf", "2": {"b": "inf"}}}},
    }
    back = loads(text)
    assert math.isnan(back.pop("loss/train"))
    assert back == {key: value for key, value in VALUE.items() if key != "loss/train"}


def test_finite_objects_and_other_json_are_unchanged():
    assert dumps({"b": 0.1, "a": (1, 2)}, sort_keys=True) == '{"a": [1, 2], "b": 0.1}'
    assert loads('{"b": 0.1}') == {"b": 0.1}
    assert loads("[1]") == [1]


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "nonfinite": {"a": "nan"}}',
        '{"a": null, "nonfinite": {"b": "nan"}}',
        '{"a": null, "nonfinite": {"a": "1"}}',
        '{"a": [null], "nonfinite": {"a": {"1": "nan"}}}',
        '{"a": null, "nonfinite": 3}',
        "{",
    ],
)
def test_flags_that_do_not_fit_are_errors(text):
    with pytest.raises(ValueError, match=r"flag 'nonfinite' does not fit|Expecting"):
        loads(text)
