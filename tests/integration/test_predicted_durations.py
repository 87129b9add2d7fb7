"""benchmarks/predicted_durations.py: the work that is added costs what it should."""

import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from support.setups import make, on
from support.sources import ROOT

spec = spec_from_file_location("predicted_durations", ROOT / "benchmarks" / "predicted_durations.py")
durations = sys.modules[spec.name] = module_from_spec(spec)
spec.loader.exec_module(durations)
DEVICES, Execution, predict = durations.DEVICES, durations.Execution, durations.predict

SETUP = on(make(24, 4096, 32, 2048, 51_200), accumulation=16)
A100, PLAIN = DEVICES["A100-80"], Execution()


def test_one_gpu_computes_and_waits_for_nobody():
    found = predict(SETUP, A100, PLAIN)
    assert (found.model, found.pipe, found.bubble, found.data) == (0, 0, 0, 0)
    parts = (found.products, found.attention, found.elementwise, found.update)
    assert found.total == pytest.approx(sum(parts))
    # 12 h^2 per layer and V h in the head, two operations each, three times; at most the peak.
    operations = 6 * 16 * 2048 * (24 * 12 * 4096**2 + 51_200 * 4096)
    assert 0.5 < operations / A100.peak / found.products < 0.89


def test_recomputation_costs_what_it_repeats():
    none, core, half, everything = (
        predict(SETUP, A100, Execution(recomputed=what)) for what in ("none", "core", "half", "all")
    )
    forward = core.attention - none.attention
    assert forward == pytest.approx(none.attention / 3.5)  # Flash attention's backward pass is 2.5 of it.
    assert (core.products, core.elementwise) == (none.products, none.elementwise)
    assert everything.products - none.products == pytest.approx(2 * (half.products - none.products))
    assert everything.attention == pytest.approx(core.attention)


def test_an_interleaved_schedule_divides_the_bubble():
    setup = on(SETUP, stages=8, accumulation=64)
    plain, chunked = (predict(setup, A100, Execution(chunks=count)) for count in (1, 3))
    assert plain.bubble > 0
    # It sends three times as often, also while the pipeline fills.
    assert chunked.pipe == pytest.approx(3 * plain.pipe)
    sent = plain.pipe / 64
    assert chunked.bubble - 7 * sent == pytest.approx((plain.bubble - 7 * sent) / 3)


def test_adapters_of_a_host_work_together():
    alone, shared = (
        predict(on(SETUP, tensor=ranks, data=16, accumulation=1), A100, PLAIN).data for ranks in (8, 1)
    )
    # A rank of eight sends an eighth through one adapter, and one that is alone all through eight.
    # Norms and some biases are not divided.
    assert shared == pytest.approx(alone, rel=0.02)


def test_zero_3_hides_its_messages_behind_the_passes():
    sharded = on(SETUP, data=8, zero=3, accumulation=2)
    assert predict(sharded, A100, PLAIN).data == 0
    slow = replace(A100, link_bandwidth=5e9)
    assert predict(sharded, slow, PLAIN).data > 0
