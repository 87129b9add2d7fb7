"""The small copy of a configuration: sizes are small, mechanisms stay."""

import json
from pathlib import Path

import pytest

from neox_config import Text, load_config, resolve
from neox_config.derive.widths import head_width
from neox_config.spec.read_model import read_model
from neox_launcher.verify_layout.sizes import sizes_of
from neox_launcher.verify_layout.small import reference_settings, small_config, with_settings
from support.settings import TINY


def config_of(settings):
    return load_config([], texts=[Text(json.dumps(TINY | settings), name="settings")])


CONFIGS = [
    path
    for path in sorted(Path("configs").glob("*.yml"))
    if "num-layers" in path.read_text() and "train-micro-batch-size-per-gpu" in path.read_text()
]


def small_of(settings):
    config = config_of(settings)
    return small_config(config, sizes_of(config, {}, is_cut=True))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_has_a_small_copy_with_its_mechanisms(path):
    config = load_config([path])
    sizes = sizes_of(config, {}, is_cut=True)
    small = small_config(config, sizes).config
    before, after = read_model(config), resolve(small, devices=sizes.processes).model
    assert after.width <= 128
    assert len(after.layers) <= 8
    assert set(after.kinds) == set(before.kinds)
    assert (after.norm.kind, after.is_tied, after.objective) == (
        before.norm.kind,
        before.is_tied,
        before.objective,
    )
    assert small.optimizer.optimizer.type == config.optimizer.optimizer.type
    assert small.zero.zero_optimization.stage == config.zero.zero_optimization.stage


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_reference_is_one_process_of_the_torch_engine_with_the_same_micro_batches(path):
    config = load_config([path])
    sizes = sizes_of(config, {}, is_cut=True)
    small = small_config(config, sizes).config
    own = resolve(small, devices=sizes.processes)
    plain = resolve(with_settings(small, reference_settings(small, sizes), name="reference"), devices=1)
    assert plain.model == own.model
    assert (plain.run.layout.world, plain.run.layout.is_pipeline, plain.run.engine.name) == (
        1,
        False,
        "torch",
    )
    assert plain.run.batch.micro == own.run.batch.micro
    assert plain.run.batch.whole == own.run.batch.whole
    assert plain.run.recomputation.segment is None
    assert plain.run.compilation.requested is False


def test_heads_keep_their_ratio_up_to_three():
    small = small_of({"num_attention_heads": 64, "num_kv_heads": 8, "hidden_size": 4096}).config.model
    assert (small.num_attention_heads, small.num_kv_heads, small.hidden_size) == (6, 2, 48)


def test_tensor_parallel_ranks_have_two_key_value_heads():
    settings = {"num_attention_heads": 64, "num_kv_heads": 8, "hidden_size": 4096, "model_parallel_size": 8}
    small = small_of(settings).config
    assert (small.model.num_kv_heads, small.parallelism.model_parallel_size) == (4, 2)


def test_a_pattern_of_layers_keeps_its_period():
    pattern = {"attention_config": [[["global", "local", "local"], 8]], "sparsity_config": {"block": 4}}
    small = small_of({"num_layers": 24, **pattern}).config
    assert list(read_model(small).kinds) == ["global", "local", "local"]


def test_layers_that_stages_share_unequally_stay_unequal():
    small = small_of({"num_layers": 10, "pipe_parallel_size": 4}).config
    assert small.model.num_layers % small.parallelism.pipe_parallel_size


def test_a_window_stays_shorter_than_a_sample():
    small = small_of(
        {"seq_length": 4096, "max_position_embeddings": 8192, "sliding_window_width": 512}
    ).config
    assert small.attention.sliding_window_width < small.model.seq_length
    assert small.model.max_position_embeddings == 2 * small.model.seq_length


def test_what_starts_later_starts_at_once():
    small = small_of(
        {
            "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.001, "freeze_step": 20_000}},
            "warmup": 0.01,
            "zero_optimization": {"stage": 0},
        }
    ).config
    assert small.optimizer.optimizer.params.freeze_step == 1
    assert small.lr_schedule.warmup == 0


def test_changes_are_listed_with_both_values():
    changes = {
        change.name: (change.before, change.after) for change in small_of({"hidden_dropout": 0.1}).changes
    }
    assert changes["hidden_dropout"] == (0.1, 0)
    assert "norm" not in changes


def test_what_requires_gpus_is_left_to_the_devices():
    settings = {"scaled_upper_triang_masked_softmax_fusion": True, "distributed_backend": "nccl"}
    small = small_of(settings).config
    assert small.attention.scaled_upper_triang_masked_softmax_fusion == "auto"
    assert small.parallelism.distributed_backend is None


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        (
            {
                "curriculum_learning": {
                    "enabled": True,
                    "curriculum_type": "seqlen",
                    "min_difficulty": 64,
                    "max_difficulty": 1024,
                    "schedule_type": "fixed_linear",
                    "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 8},
                },
                "seq_length": 1024,
                "max_position_embeddings": 1024,
            },
            "curriculum_learning.max_difficulty",
            32,
        ),
        ({"num_attention_heads": 6, "num_kv_heads": 1, "model_parallel_size": 2}, "num_attention_heads", 2),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}, "engine": "deepspeed"},
            "zero_optimization.zero_hpz_partition_size",
            2,
        ),
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}}}, "optimizer.params.freeze_step", 1),
        ({"lora_rank": 2, "lora_base": "x", "lora_dropout": 0.1}, "lora_dropout", 0),
    ],
)
def test_what_depends_on_sizes_follows_them(settings, name, value):
    assert small_of(settings).config.value_of(name) == value


def test_the_dropout_of_adapters_is_compared():
    assert small_of({"lora_rank": 2, "lora_base": "x", "lora_dropout": 0.1}).dropout["lora_dropout"] == 0.1


@pytest.mark.parametrize(
    "settings", [{"bias_gelu_fusion": True}, {"bias_gelu_fusion": "auto"}, {"openai_gelu": True}, {}]
)
def test_the_reference_has_the_same_activation(settings):
    config = config_of(settings)
    sizes = sizes_of(config, {}, is_cut=True)
    small = small_config(config, sizes).config
    plain = with_settings(small, reference_settings(small, sizes), name="plain")
    assert read_model(plain) == read_model(small)
    assert plain.model.bias_gelu_fusion is False


@pytest.mark.parametrize("head_dim", [None, 10])
def test_kinds_of_attention_keep_their_windows_and_factors_within_short_sequences(head_dim):
    scaling = {"type": "longrope", "original_max_position_embeddings": 2048}
    count = (head_dim or 4) // 2
    scaling |= {"short_factor": [1.0] * count, "long_factor": [4.0] * count}
    small = small_of(
        {
            "seq_length": 4096,
            "max_position_embeddings": 4096,
            "pos_emb": "rotary",
            "head_dim": head_dim,
            "num_layers": 3,
            "attention_config": ["near", "nearer", "long"],
            "attention_kinds": {
                "near": {"sliding_window_width": 512},
                "nearer": {"sliding_window_width": 128},
                "long": {"rotary_scaling": scaling},
            },
        }
    ).config
    kinds = small.attention.attention_kinds
    windows = [kinds[name].sliding_window_width for name in ("near", "nearer")]
    assert small.model.seq_length > windows[0] > windows[1] > 0
    own = kinds["long"].rotary_scaling
    assert own.original_max_position_embeddings < small.model.seq_length
    pairs = head_width(small) // 2
    assert len(own.short_factor) == len(own.long_factor) == pairs
