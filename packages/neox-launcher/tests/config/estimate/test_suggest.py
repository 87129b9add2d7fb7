"""Suggested layouts: every one fits and is allowed, and the fastest comes first."""

from dataclasses import replace

import pytest

from neox_config.estimate import device_memory
from neox_config.estimate.shapes import Layout, Shape
from neox_config.estimate.suggest import USABLE_MEMORY, Cluster, seconds_per_iteration, suggest

GIB = 2**30
SHAPE = Shape(
    num_layers=24,
    hidden_size=2048,
    heads=16,
    seq_length=2048,
    vocab_size=50_304,
    mlp_width=8192,
    attention_types=("global",) * 24,
    max_positions=2048,
)
LARGE = replace(
    SHAPE,
    num_layers=96,
    hidden_size=12288,
    heads=96,
    mlp_width=4 * 12288,
    attention_types=("global",) * 96,
)


def layouts(shape, cluster, samples=512, like=None):
    return [found.layout for found in suggest(shape, cluster, samples=samples, like=like or Layout())]


def test_a_small_model_on_one_host_needs_data_parallelism_alone():
    best = layouts(SHAPE, Cluster(devices=8, memory=80 * GIB))[0]
    assert (best.model_parallel, best.stages, best.data_parallel) == (1, 1, 8)
    assert best.segment_layers is None


def test_gpt3_on_a_thousand_devices_gets_a_host_for_each_layer_and_a_pipeline_across_hosts():
    best = layouts(LARGE, Cluster(devices=1024, memory=80 * GIB), samples=1536)[0]
    # arXiv:2104.04473 ran it with 8-way tensor and 8-way pipeline parallelism; 4 to 16 stages are as good.
    assert best.model_parallel == 8
    assert best.stages in (4, 8, 16)


@pytest.mark.parametrize("memory", [16, 40, 80])
def test_everything_suggested_fits_and_keeps_the_rules(memory):
    cluster = Cluster(devices=64, memory=memory * GIB, devices_per_host=4)
    found = suggest(SHAPE, cluster, samples=512, like=Layout())
    assert found
    for one in found:
        layout = one.layout
        assert layout.devices == 64
        assert layout.samples == 512
        assert layout.model_parallel <= 4
        assert SHAPE.heads % layout.model_parallel == 0
        assert SHAPE.num_layers % layout.stages == 0
        assert layout.zero_stage < 2 or layout.stages == 1
        worst = max(device_memory(SHAPE, layout, stage).total for stage in range(layout.stages))
        assert worst == one.memory.total <= USABLE_MEMORY * cluster.memory


def test_the_fastest_comes_first_and_each_split_once():
    cluster = Cluster(devices=64, memory=80 * GIB)
    found = suggest(SHAPE, cluster, samples=512, like=Layout())
    seconds = [one.seconds for one in found]
    assert seconds == sorted(seconds)
    assert seconds == [seconds_per_iteration(SHAPE, one.layout, cluster) for one in found]
    splits = [(one.layout.model_parallel, one.layout.stages) for one in found]
    assert len(set(splits)) == len(splits)


def test_less_memory_costs_recomputation_or_sharing():
    one_host = Cluster(devices=8, memory=80 * GIB)
    roomy = suggest(SHAPE, one_host, samples=512, like=Layout())[0]
    tight = suggest(SHAPE, replace(one_host, memory=8 * GIB), samples=512, like=Layout())[0]
    assert tight.memory.total < roomy.memory.total
    assert tight.seconds > roomy.seconds


def test_recomputed_attention_is_suggested_where_stored_scores_do_not_fit():
    shape, cluster = replace(SHAPE, keeps_scores=True), Cluster(devices=1, memory=28 * GIB)
    for like in (Layout(), Layout(recomputes_attention=True), Layout(segment_layers=2)):
        (best,) = layouts(shape, cluster, like=like)
        assert (best.segment_layers, best.recomputes_attention) == (None, True)
        # With enough memory nothing is recomputed.
        (best,) = layouts(shape, replace(cluster, memory=32 * GIB), like=like)
        assert (best.segment_layers, best.recomputes_attention) == (None, False)
    (least,) = layouts(shape, replace(cluster, memory=24 * GIB), like=Layout(segment_layers=2))
    assert (least.segment_layers, least.recomputes_attention) == (2, False)


def test_nothing_is_suggested_where_nothing_fits():
    assert layouts(LARGE, Cluster(devices=8, memory=16 * GIB), samples=8) == []


def test_offloaded_optimizers_keep_zero_on():
    found = layouts(SHAPE, Cluster(devices=8, memory=16 * GIB), like=Layout(optimizer_on_host=True))
    assert found
    assert all(layout.zero_stage >= 1 for layout in found)
    found = layouts(
        SHAPE,
        Cluster(devices=8, memory=16 * GIB),
        like=Layout(optimizer_on_host=True, parameters_on_host=True),
    )
    assert {layout.zero_stage for layout in found} == {3}


def test_tensor_parallel_ranks_share_the_key_value_heads():
    shared = replace(SHAPE, kv_heads=2)
    found = layouts(shared, Cluster(devices=8, memory=80 * GIB))
    assert {layout.model_parallel for layout in found} == {1, 2}


def test_time_grows_with_the_bubble_the_recomputation_and_slower_devices():
    cluster = Cluster(devices=8, memory=80 * GIB)
    layout = Layout(stages=8, accumulation=64)
    base = seconds_per_iteration(SHAPE, layout, cluster)
    half = seconds_per_iteration(SHAPE, replace(layout, accumulation=32), cluster)
    assert half > base / 2  # the bubble is a larger part
    assert seconds_per_iteration(SHAPE, replace(layout, segment_layers=1), cluster) > 1.25 * base
    assert seconds_per_iteration(SHAPE, layout, replace(cluster, tflops=75.0)) > 1.7 * base
