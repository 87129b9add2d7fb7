"""The search space: stages and micro-batches computed by hand, limits, and memory."""

import pytest

from neox_config import resolve
from neox_config.estimate.setup import setup_of
from neox_config.estimate.suggest import USABLE_MEMORY, Cluster, largest_memory
from neox_launcher.autotuning.space import Experiment, search_space

ON = "autotuning: {enabled: true}"
CLUSTER = Cluster(devices=2, memory=0)


def space(config, *, devices=2, memory=None):
    resolved = resolve(config, devices=devices)
    return search_space(resolved, setup_of(resolved, vocab_size=512), CLUSTER, device_memory=memory)


def batches(found, stage):
    tried = [one.experiment for one in found if one.experiment.zero_stage == stage]
    return [(one.micro_batch, one.accumulation) for one in tried]


def test_the_batch_grows_from_the_configured_micro_batch(load):
    found = space(load(ON, "gradient-accumulation-steps=3"))
    assert {one.experiment.zero_stage for one in found} == {0, 1, 2, 3}
    for stage in range(4):
        assert batches(found, stage) == [(2, 3), (4, 3), (8, 3)]
    assert [one.samples for one in found[:3]] == [12, 24, 48]


def test_a_given_train_batch_size_is_kept(load):
    """24 samples on two devices: a share of 12, which 2, 3 and 4 divide."""
    found = space(load(ON, "train-batch-size=24", "autotuning.num_tuning_micro_batch_sizes=4"))
    assert batches(found, 1) == [(2, 6), (3, 4), (4, 3), (6, 2)]
    assert {one.samples for one in found} == {24}


@pytest.mark.parametrize(
    ("limit", "expected"), [(16, [(2, 1), (4, 1), (8, 1)]), (8, [(1, 1), (2, 1), (4, 1)]), (1, [])]
)
def test_no_batch_is_larger_than_the_limit(load, limit, expected):
    """Smaller micro-batches are tried if larger ones exceed the limit."""
    found = space(load(ON, f"autotuning.max_train_batch_size={limit}"))
    assert batches(found, 0) == expected


def test_a_pipeline_excludes_gradient_partitioning(load):
    found = space(load(ON, "pipe-parallel-size=1", "engine=deepspeed"))
    assert [one.experiment.zero_stage for one in found] == [0, 0, 0, 1, 1, 1]


def test_one_copy_uses_only_stage_0(load):
    assert {one.experiment.zero_stage for one in space(load(ON), devices=1)} == {0}


def test_without_fast_recomputation_and_overlap_are_varied(load):
    settings = ("autotuning.fast=false", "autotuning.num_tuning_micro_batch_sizes=1")
    names = [
        one.experiment.name for one in space(load(ON, *settings, "pipe-parallel-size=1", "engine=deepspeed"))
    ]
    assert names == [
        "zero0-micro2-accumulate1-no-recompute",
        "zero0-micro2-accumulate1-recompute",
        "zero1-micro2-accumulate1-no-recompute-no-overlap",
        "zero1-micro2-accumulate1-no-recompute-overlap",
        "zero1-micro2-accumulate1-recompute-no-overlap",
        "zero1-micro2-accumulate1-recompute-overlap",
    ]


def test_recomputation_is_not_estimated_faster(load):
    settings = ("autotuning.fast=false", "autotuning.num_tuning_micro_batch_sizes=1")
    kept, recomputed = space(load(ON, *settings), devices=1)
    assert kept.experiment.checkpoint_activations is False
    assert recomputed.experiment.checkpoint_activations is True
    assert recomputed.seconds >= kept.seconds


def test_recomputation_has_the_configured_granularity(load):
    """Memory for the configured micro-batch with recomputed attention, and not without."""
    settings = ("checkpoint-granularity=selective", "onnx-safe=true", "seq-length=32")
    resolved = resolve(load(ON, "checkpoint-activations=true", *settings), devices=1)
    assert resolved.run.recomputation.attention
    needed = largest_memory(setup_of(resolved, vocab_size=512)).total
    config = load(ON, "autotuning.fast=false", *settings)
    found = space(config, devices=1, memory=int(needed / USABLE_MEMORY) + 1)
    tried = [(one.experiment.checkpoint_activations, one.experiment.micro_batch) for one in found]
    assert tried == [(False, 1), (True, 1), (True, 2)]


def test_a_known_memory_limits_the_micro_batch(load):
    """The three largest powers of two that fit, where each larger micro-batch is faster per sample."""
    config = load(ON)
    resolved = resolve(config, devices=2)
    setup = setup_of(resolved, vocab_size=512).changed(batch={"micro": 16})
    needed = largest_memory(setup).total
    found = space(config, memory=int(needed / USABLE_MEMORY) + 1)
    assert batches(found, 0) == [(4, 1), (8, 1), (16, 1)]


def test_too_little_memory_gives_no_candidates(load):
    assert space(load(ON), memory=1000) == []


def test_settings_are_parameters():
    experiment = Experiment(
        zero_stage=3,
        micro_batch=4,
        accumulation=2,
        checkpoint_activations=False,
        overlap_comm=True,
        model_parallel_size=2,
    )
    assert experiment.settings == {
        "zero_optimization.stage": 3,
        "zero_optimization.overlap_comm": True,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "checkpoint_activations": False,
        "model_parallel_size": 2,
    }
    assert experiment.name == "zero3-micro4-accumulate2-no-recompute-overlap-model2"
