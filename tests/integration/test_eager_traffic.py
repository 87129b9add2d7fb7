"""Bytes that a layer's operators move if they are called one by one."""

import dataclasses

import pytest

from gpu_gate.eager_traffic import PLAIN, llama_operators, moved_bytes

MIB = 2**20
HIDDEN, GATE = 2 * 2048 * 2048 * 2, 2 * 2048 * 5504 * 2  # Bytes of the hidden states, and of up.


def moved(operators, **settings):
    return sum(moved_bytes(operators, **settings).values())


@pytest.fixture(scope="module")
def fused():
    return moved_bytes(llama_operators())


def test_fused_operators_move_less_than_half(fused):
    kept = moved(llama_operators(), recompute_gated_product=False)
    found = [round(total / MIB) for total in (moved(PLAIN), sum(fused.values()), kept)]
    assert found == [1770, 749, 706]


@pytest.mark.parametrize(
    ("without", "passes"),
    # The sum before the norm: one pass of five. The sum of the gradients after either norm: two of six. The
    # gated product: 14 passes instead of 9, one of which computes the product again.
    [
        ({"norm_of_sum": None}, HIDDEN),
        ({"norm_with_input": None}, 2 * HIDDEN),
        ({"norm_of_sum": None, "norm_with_input": None}, 5 * HIDDEN),
        ({"gated_again": None, "gated_activation": None}, 5 * GATE),
    ],
)
def test_each_kernel_has_its_part(fused, without, passes):
    more = moved(dataclasses.replace(llama_operators(), **without)) - sum(fused.values())
    assert more == pytest.approx(passes, rel=0.01)


def test_gradients_of_queries_keys_and_values_are_written_once(fused):
    apart = moved_bytes(dataclasses.replace(llama_operators(), split_rotary=None))
    padded = ("select_backward", "slice_backward", "cat", "clone")
    assert [name for name in padded if fused[name]] == []
    assert sum(apart.values()) - sum(fused.values()) > 250 * MIB
