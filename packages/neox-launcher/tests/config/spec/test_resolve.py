"""Resolving a configuration for a number of devices."""

import pytest

from neox_config import Resolved, decode_resolved, encode_resolved, resolve
from neox_config.derive.attention_layers import expand_attention
from neox_config.errors import ConfigError
from support.refusals import refused

BATCHES = [
    # train, micro, accumulation, devices -> train, micro, accumulation
    (None, 2, None, 1, (2, 2, 1)),
    (None, 2, 3, 4, (24, 2, 3)),
    (24, 2, None, 4, (24, 2, 3)),
    (24, None, 3, 4, (24, 2, 3)),
    (24, None, None, 4, (24, 6, 1)),
    (24, 2, 3, 4, (24, 2, 3)),
]


SHORT_FIRST = """{enabled: true, curriculum_type: seqlen, min_difficulty: 6, max_difficulty: 32,
  schedule_type: fixed_linear, schedule_config: {total_curriculum_step: 10, difficulty_step: 4}}"""
SHORT_FIRST_BY_METRIC = """{enabled: true, data_sampling: {enabled: true, num_epochs: 1, curriculum_learning:
  {enabled: true, data_cluster_path: c, curriculum_metrics: {seqlen_truncate: {index_to_sample_path: s,
  index_to_metric_path: m, difficulty_type: value, clustering_type: single_cluster, min_difficulty: 4,
  max_difficulty: 32, schedule_type: fixed_linear,
  schedule_config: {total_curriculum_step: 10, difficulty_step: 6}}}}}}"""


@pytest.mark.parametrize(("train", "micro", "accumulation", "devices", "expected"), BATCHES)
def test_any_of_the_batch_sizes_gives_the_others(load, train, micro, accumulation, devices, expected):
    sizes = {"train_batch_size": train, "gas": accumulation}
    text = "\n".join(f"{name}: {value}" for name, value in sizes.items() if value is not None)
    override = f"train-micro-batch-size-per-gpu={'null' if micro is None else micro}"
    resolved = resolve(load(text, override), devices=devices)
    assert (resolved.run.batch.whole, resolved.run.batch.micro, resolved.run.batch.accumulation) == expected


@pytest.mark.parametrize(
    ("text", "overrides", "devices", "sentence"),
    [
        ("train-batch-size: 25", [], 4, "is not divisible by micro-batch 2 x data-parallel size 4"),
        ("train-batch-size: 25", [], 4, "use 24 or 32"),
        ("train-batch-size: 24\ngas: 2", [], 4, "2 x 2 x 4 = 16"),
        ("train-batch-size: 9", ["train-micro-batch-size-per-gpu=null"], 4, "by the data-parallel size 4"),
        ("model-parallel-size: 4", [], 6, "model-parallel-size: 4"),
        ("model-parallel-size: 4", [], 6,
            "does not divide the 6 devices of this job\n          use 1, 2, 3, 6"),
        ("model-parallel-size: 2\npipe-parallel-size: 2", [], 2, "times the other parallel size (2)"),
        ("pipe-parallel-size: 3", [], 4, "pipe-parallel-size: 3"),
        ("model-parallel-size: 8", ["num-attention-heads=4"], 8,
            "cannot be divided among 8 tensor-parallel devices"),
        ("model-parallel-size: 4\nactivation: geglu", [], 4, "mlp_width: 170"),
        ("model-parallel-size: 4\nactivation: geglu", [], 4, "set mlp-width: 192"),
        ("model-parallel-size: 4\nintermediate-size: 302", [], 4,
            "intermediate-size: 302\n          gives an MLP width of 302, which cannot be divided"),
        ("model-parallel-size: 4\nexpansion-factor: 1.1", [], 4,
            "set mlp-width: 96 instead of expansion-factor, or use another"),
        ("model-parallel-size: 4\nsequence-parallel: true", ["seq-length=30"], 4, "use 28, or set sequence"),
        (f"model-parallel-size: 4\nsequence-parallel: true\ncurriculum_learning: {SHORT_FIRST}", [], 4,
            "curriculum_learning.min_difficulty: 6"),
        (f"model-parallel-size: 4\nsequence-parallel: true\ndata_efficiency: {SHORT_FIRST_BY_METRIC}", [], 4,
            "seqlen_truncate.schedule_config.difficulty_step: 6"),
        ("zero_optimization: {stage: 3, zero_hpz_partition_size: 3}", [], 4, "the data-parallel size 4"),
        ("zero_optimization: {stage: 3, zero_hpz_partition_size: 2}\nmodel-parallel-size: 2", [], 4,
            "does not work with tensor parallelism"),
        ("zero_optimization: {stage: 3, zero_hpz_partition_size: 2}\npipe-parallel-size: 2\nengine: torch",
            [], 8, "does not work with pipeline parallelism"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_reported_with_a_remedy(load, text, overrides, devices, sentence):
    config = load(text, *overrides)
    with pytest.raises(ConfigError) as found:
        resolve(config, devices=devices)
    assert sentence in str(found.value)


def test_hosts_are_named_in_messages(load):
    with refused(ConfigError, "8 devices", "job (2"):
        resolve(load("model-parallel-size: 3"), devices=8, hosts=2)


def test_devices_are_split_into_copies_stages_and_shards(load):
    config = load("pipe-parallel-size: 2\nmodel-parallel-size: 2")
    resolved = resolve(config, devices=8)
    assert (resolved.run.layout.data, resolved.run.layout.stages, resolved.run.layout.tensor) == (2, 2, 2)
    assert resolved.run.layout.is_pipeline
    assert resolved.run.batch.whole == 4


@pytest.mark.parametrize(
    ("stages", "engine", "uses_pipeline"),
    [(0, "deepspeed", False), (1, "deepspeed", True), (1, "torch", False), (1, "auto", False)],
)
def test_one_stage_is_a_pipeline_for_deepspeed_alone(load, stages, engine, uses_pipeline):
    resolved = resolve(load(f"pipe-parallel-size: {stages}\nengine: {engine}"), devices=1)
    assert resolved.run.layout.is_pipeline is uses_pipeline
    assert resolved.run.layout.stages == 1


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("", "fp32"),
        ("precision: fp32", "fp32"),
        ("precision: fp16", "fp16"),
        ("precision: bfloat16", "bf16"),
        ("fp16: {enabled: true}", "fp16"),
        ("bf16: {enabled: true}", "bf16"),
        ("fp16: {enabled: true, type: bfloat16}", "bf16"),
    ],
)
def test_precision_comes_from_the_blocks_or_its_name(load, text, precision):
    assert resolve(load(text), devices=1).run.precision.weights == precision


@pytest.mark.parametrize(
    ("text", "width"),
    [("", 256), ("activation: swiglu", 170), ("activation: geglu\nmlp-width: 100", 100)],
)
def test_the_inner_width(load, text, width):
    assert resolve(load(text), devices=1).model.layers[0].channel.width == width


@pytest.mark.parametrize(
    ("pattern", "types"),
    [
        (None, "global global global global"),
        (((("global", "local"), 2),), "global local global local"),
        (((("global",), 1), (("local",), 3)), "global local local local"),
        (((("global", "local"), "all"),), "global local global local"),
        ((("bigbird", 4),), "bigbird bigbird bigbird bigbird"),
        (("global", "local", "gmlp", "amlp"), "global local gmlp amlp"),
    ],
)
def test_attention_types_per_layer(pattern, types):
    assert expand_attention(pattern, 4) == tuple(types.split())


def test_the_length_of_the_decay_is_that_of_the_training_unless_given(load):
    assert resolve(load(), devices=1).update.decay_iterations == 10
    assert resolve(load("lr-decay-iters: 5"), devices=1).update.decay_iterations == 5


def test_a_resolved_configuration_survives_the_command_line(load):
    config = load(
        "attention-config: [[[global, local], 2]]\namp: {opt_level: O1}\n"
        "scheduler: {type: WarmupLR, params: {warmup_num_steps: 5}}\n"
        "save: é\nsave-interval: 2\nweight-decay: 0.1"
    )
    resolved = resolve(config, devices=2)
    word = encode_resolved(resolved)
    assert word.isascii()
    assert " " not in word
    decoded = decode_resolved(word)
    assert decoded == resolved
    assert decoded.config.sources == config.sources
    assert decoded.config.optimizer.optimizer.params.given() == config.optimizer.optimizer.params.given()
    assert decoded != Resolved.of(load(), resolved.sizes)


@pytest.mark.parametrize("word", ["", "abc", "eJxLTEoGAAJNASc=", "####", "eJyrrgUAAXUA+Q=="])
def test_a_damaged_word_is_refused(word):
    with refused(ConfigError, "neox-launch of the"):
        decode_resolved(word)


@pytest.mark.parametrize(
    ("sizes", "remedy"),
    [
        ((100, 64, None), "use 64 or 128"),
        ((90, 4, None), "use 88 or 92"),
        ((30, None, 64), "use 64"),
        ((100, 10, 3), "set train-batch-size: 30"),
    ],
)
def test_batch_sizes_that_disagree_have_numbers_that_agree(load, sizes, remedy):
    names = ("train-batch-size", "train-micro-batch-size-per-gpu", "gradient-accumulation-steps")
    given = [f"{name}={'null' if size is None else size}" for name, size in zip(names, sizes, strict=True)]
    with pytest.raises(ConfigError) as refusal:
        resolve(load("", *given), devices=1)
    (problem,) = refusal.value.problems
    assert problem.remedy == remedy
