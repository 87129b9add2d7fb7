"""Comparing checkpoints tensor by tensor: to the last bit, and beyond rounding."""

import math

import pytest
import torch

from neox_config.facts.checkpoints import MANIFEST
from neox_model.checkpoint.contents import Layout, Manifest
from neox_model.checkpoint.names import in_model_order
from neox_model.verify.rounding import LIMITS
from neox_model.verify.tensors import State, differences, differences_beyond_rounding
from support.checkpoint_edits import write_tensors
from support.refusals import shows

WEIGHT = "layers.0.mlp.up.weight"
MOMENT = f"{WEIGHT}/exp_avg_sq"


@pytest.fixture
def state(tmp_path):
    """Return `state(name=tensor, ...)`, which writes a checkpoint of one shard."""

    def make(tensors, replicas=1):
        folder = tmp_path / f"state{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        records, size = write_tensors(folder / "shard", tensors)
        layout = Layout(data=replicas, model=1, pipe=1)
        manifest = Manifest(iteration=1, layout=layout, config={}, tensors=records, files={"shard": size})
        (folder / MANIFEST).write_text(manifest.to_json())
        return State(folder)

    return make


def found(one, other, *, of_weights=True):
    return [(found.name, found.text) for found in differences(one, other, of_weights=of_weights)]


def test_equal_states_have_no_difference_and_nan_equals_itself(state):
    values = torch.tensor([1.0, math.nan, -0.0])
    assert found(state({WEIGHT: values}), state({WEIGHT: values.clone()})) == []


def test_the_sign_of_zero_counts(state):
    ((name, text),) = found(
        state({WEIGHT: torch.tensor([0.0, 1.0])}), state({WEIGHT: torch.tensor([-0.0, 1.0])})
    )
    assert name == WEIGHT
    assert text.startswith("1 of 2 elements differ, by at most 0 ulp")


def test_a_tensor_that_became_nan_differs_by_infinity(state):
    ((_, text),) = found(state({WEIGHT: torch.ones(2)}), state({WEIGHT: torch.tensor([1.0, math.nan])}))
    assert shows(text, "1", "2 elements", "inf")


def test_missing_further_and_reshaped_tensors_are_differences(state):
    one = state({"a": torch.ones(2), "b": torch.ones(2), "a/exp_avg": torch.ones(2)})
    other = state({"b": torch.ones(3), "c": torch.ones(2)})
    assert found(one, other) == [
        ("a", "is missing"),
        ("b", "has the shape (3,) instead of (2,)"),
        ("c", "is there, and not in the expected state"),
    ]
    assert found(one, other, of_weights=False) == [("a/exp_avg", "is missing")]


def test_layers_are_compared_in_the_order_of_the_model():
    names = ["lm_head.weight", "layers.10.a", "layers.9.b", "embedding.w", "final_norm.weight", "layers.9.a"]
    assert in_model_order(names) == [
        "embedding.w",
        "layers.9.a",
        "layers.9.b",
        "layers.10.a",
        "final_norm.weight",
        "lm_head.weight",
    ]


def beyond(state, wanted, there, *, moment=None):
    """Differences of a weight that was 1 everywhere at the interruption."""
    moment = torch.full_like(wanted, 1e-4) if moment is None else moment
    middle = state({WEIGHT: torch.ones_like(wanted)})
    one, other = (state({WEIGHT: values, MOMENT: moment}) for values in (wanted, there))
    (difference,) = differences_beyond_rounding(middle, one, other, LIMITS["fp32"], of_weights=True)
    return difference


def test_on_another_layout_a_weight_is_measured_by_its_change(state):
    wanted = torch.ones(100) + 0.01
    rounding = beyond(state, wanted, wanted + 1e-6)
    assert rounding.text == ""
    assert rounding.relative == pytest.approx(1e-4, rel=0.05)
    fault = beyond(state, wanted, wanted + 1e-4)
    assert fault.text.startswith("differs by 1.0e-02 of its change (limit 0.001")


def test_elements_with_noisy_gradients_are_skipped(state):
    wanted, moment = torch.ones(100) + 0.01, torch.full((100,), 1e-4)
    there = wanted.clone()
    there[:10] -= 0.02
    assert beyond(state, wanted, there, moment=moment).text
    moment[:10] = 1e-16
    assert beyond(state, wanted, there, moment=moment).text == ""


@pytest.mark.parametrize(("key", "power"), [("exp_avg", 1), ("exp_inf", 1), ("accumulator_0", 2)])
def test_other_states_show_noisy_gradients_too(state, key, power):
    """Lion's mean, Adamax's maximum, and SM3's sums of squares of a vector."""
    wanted = torch.ones(100) + 0.01
    there = wanted.clone()
    there[:10] -= 0.02

    def text(sizes):
        middle = state({WEIGHT: torch.ones(100)})
        kept = {f"{WEIGHT}/{key}": sizes.pow(power), f"{WEIGHT}/row_sums": torch.ones(7)}
        one, other = (state({WEIGHT: values} | kept) for values in (wanted, there))
        (difference,) = differences_beyond_rounding(middle, one, other, LIMITS["fp32"], of_weights=True)
        assert not any(
            found.text
            for found in differences_beyond_rounding(middle, one, other, LIMITS["fp32"], of_weights=False)
        )
        return difference.text

    sizes = torch.full((100,), 1e-2)
    assert text(sizes)
    sizes[:10] = 1e-8
    assert text(sizes) == ""


def test_adamaxs_maximum_counts_before_its_mean(state):
    """A mean may be small by chance, where gradients of both signs meet."""
    wanted, mean = torch.ones(100) + 0.01, torch.full((100,), 1e-2)
    there = wanted.clone()
    there[:10] -= 0.02
    mean[:10] = 1e-8
    kept = {f"{WEIGHT}/exp_avg": mean, f"{WEIGHT}/exp_inf": torch.full((100,), 1e-2)}
    middle = state({WEIGHT: torch.ones(100)})
    one, other = (state({WEIGHT: values} | kept) for values in (wanted, there))
    (difference,) = differences_beyond_rounding(middle, one, other, LIMITS["fp32"], of_weights=True)
    assert difference.text


def test_a_weight_that_did_not_move_and_should_have_is_found(state):
    wanted = torch.ones(100) + 0.01
    assert beyond(state, wanted, torch.ones(100)).relative == pytest.approx(1.0)
    assert beyond(state, torch.ones(100), wanted).relative == math.inf


def test_states_of_replicas_are_compared_only_with_as_many_replicas(state):
    weight = {WEIGHT: torch.ones(3)}
    two = state(weight | {f"{WEIGHT}/worker_error": torch.ones(2, 3)}, replicas=2)
    other = state(weight | {f"{WEIGHT}/worker_error": torch.zeros(2, 3)}, replicas=2)
    three = state(weight | {f"{WEIGHT}/worker_error": torch.ones(3, 3)}, replicas=3)
    assert [name for name, _ in found(two, other, of_weights=False)] == [f"{WEIGHT}/worker_error"]
    assert found(two, three, of_weights=False) == []
    assert not list(differences_beyond_rounding(two, two, three, LIMITS["fp32"], of_weights=False))
