"""Suggested layouts: every one fits and is allowed, and the fastest comes first."""

from dataclasses import replace

import pytest

from neox_config.estimate import device_memory
from neox_config.estimate.suggest import USABLE_MEMORY, Cluster, seconds_per_iteration, suggest
from support.setups import make, on

GIB = 2**30
SMALL = make(24, 2048, 16, 2048, 50_304)
LARGE = make(96, 12288, 96, 2048, 50_304)


def setups(like, cluster, samples=512):
    return [found.setup for found in suggest(like, cluster, samples=samples)]


def split(setup):
    return setup.run.layout.tensor, setup.run.layout.stages


def recomputed(setup):
    return setup.run.recomputation.segment, setup.run.recomputation.attention


def test_a_small_model_on_one_host_needs_data_parallelism_alone():
    best = setups(SMALL, Cluster(devices=8, memory=80 * GIB))[0]
    assert (*split(best), best.run.layout.data) == (1, 1, 8)
    assert recomputed(best) == (None, False)


def test_gpt3_on_a_thousand_devices_gets_a_host_for_each_layer_and_a_pipeline_across_hosts():
    best = setups(LARGE, Cluster(devices=1024, memory=80 * GIB), samples=1536)[0]
    # arXiv:2104.04473 ran it with 8-way tensor and 8-way pipeline parallelism; 4 to 16 stages are as good.
    tensor, stages = split(best)
    assert tensor == 8
    assert stages in (4, 8, 16)


@pytest.mark.parametrize("memory", [16, 40, 80])
def test_everything_suggested_fits_and_keeps_the_rules(memory):
    cluster = Cluster(devices=64, memory=memory * GIB, devices_per_host=4)
    found = suggest(SMALL, cluster, samples=512)
    assert found
    for one in found:
        layout = one.setup.run.layout
        assert one.setup.devices == 64
        assert one.setup.samples == 512
        assert layout.tensor <= 4
        assert 16 % layout.tensor == 0
        assert 24 % layout.stages == 0
        assert layout.zero < 2 or layout.stages == 1
        worst = max(device_memory(one.setup, stage).total for stage in range(layout.stages))
        assert worst == one.memory.total <= USABLE_MEMORY * cluster.memory


def test_the_fastest_comes_first_and_each_split_once():
    cluster = Cluster(devices=64, memory=80 * GIB)
    found = suggest(SMALL, cluster, samples=512)
    seconds = [one.seconds for one in found]
    assert seconds == sorted(seconds)
    assert seconds == [seconds_per_iteration(one.setup, cluster) for one in found]
    splits = [split(one.setup) for one in found]
    assert len(set(splits)) == len(splits)


def test_less_memory_costs_recomputation_or_sharing():
    one_host = Cluster(devices=8, memory=80 * GIB)
    roomy = suggest(SMALL, one_host, samples=512)[0]
    tight = suggest(SMALL, replace(one_host, memory=8 * GIB), samples=512)[0]
    assert tight.memory.total < roomy.memory.total
    assert tight.seconds > roomy.seconds


def test_recomputed_attention_is_suggested_where_stored_scores_do_not_fit():
    setup, cluster = on(SMALL, causal_softmax=True), Cluster(devices=1, memory=28 * GIB)
    for like in (setup, on(setup, attention=True), on(setup, segment=2)):
        (best,) = setups(like, cluster)
        assert recomputed(best) == (None, True)
        # With enough memory nothing is recomputed.
        (best,) = setups(like, replace(cluster, memory=32 * GIB))
        assert recomputed(best) == (None, False)
    (least,) = setups(on(setup, segment=2), replace(cluster, memory=24 * GIB))
    assert recomputed(least) == (2, False)


def test_nothing_is_suggested_where_nothing_fits():
    assert setups(LARGE, Cluster(devices=8, memory=16 * GIB), samples=8) == []


def test_offloaded_optimizers_keep_zero_on():
    cluster = Cluster(devices=8, memory=16 * GIB)
    found = setups(on(SMALL, on_host=True), cluster)
    assert found
    assert all(setup.run.layout.zero >= 1 for setup in found)
    found = setups(on(SMALL, on_host=True, weights_on_host=True), cluster)
    assert {setup.run.layout.zero for setup in found} == {3}


def test_tensor_parallel_ranks_share_the_key_value_heads():
    found = setups(make(24, 2048, 16, 2048, 50_304, num_kv_heads=2), Cluster(devices=8, memory=80 * GIB))
    assert {setup.run.layout.tensor for setup in found} == {1, 2}


def test_time_grows_with_the_bubble_the_recomputation_and_slower_devices():
    cluster = Cluster(devices=8, memory=80 * GIB)
    setup = on(SMALL, stages=8, accumulation=64)
    base = seconds_per_iteration(setup, cluster)
    half = seconds_per_iteration(on(setup, accumulation=32), cluster)
    assert half > base / 2  # the bubble is a larger part
    assert seconds_per_iteration(on(setup, segment=1), cluster) > 1.25 * base
    assert seconds_per_iteration(setup, replace(cluster, tflops=75.0)) > 1.7 * base
