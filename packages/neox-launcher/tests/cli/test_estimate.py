"""The commands `neox-config estimate` and `suggest`."""

import json

import pytest
from click.testing import CliRunner

from neox_config import load_config, resolve
from neox_config.errors import ConfigError
from neox_config.estimate.mixers import keeps_scores
from neox_config.estimate.setup import read_vocabulary_size, setup_of
from neox_launcher.cli.config import main
from neox_launcher.cli.estimate import parse_bytes
from neox_launcher.cli.launch import main as neox_launch
from neox_launcher.plan import planning
from support.refusals import refused, shows

GPT2 = {
    "num_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "max_position_embeddings": 1024,
    "make_vocab_size_divisible_by": 1,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "train_iters": 1000,
    "lr": 0.0006,
    "precision": "fp16",
}


@pytest.fixture
def write(tmp_path):
    def write_config(**settings):
        path = tmp_path / "config.yml"
        path.write_text(json.dumps(GPT2 | settings))
        return str(path)

    return write_config


def run(*arguments):
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


def value_of(output, name):
    """Return the second column of the row with this name."""
    rows = [line for line in output.splitlines() if line.strip().startswith(name + "  ")]
    return rows[0].strip().removeprefix(name).split("  ")


def cells(output, name):
    return [cell.strip() for cell in value_of(output, name) if cell.strip()]


def test_estimate_lists_the_collectives_of_a_step(write):
    path = write(model_parallel_size=2, gpt_j_residual=True, hidden_dropout=0.0)
    assert "all_reduce" not in run("estimate", path, "--devices", "4").output
    output = run("estimate", path, "--devices", "4", "--step").output
    # 12 layers and 8 micro-batches of 4 x 1,024 tokens of 768 numbers in 16 bit.
    forward = ["all_reduce", "model", "96", "1.00", f"{96 * 2 * 4 * 1024 * 768:,}"]
    assert cells(output, "layers, forward") == forward
    assert cells(output, "layers, backward") == forward
    _, _, listed = output.partition("collectives per update")
    assert cells(listed, "embedding")[:3] == ["all_reduce", "model", "8"]
    assert "not counted" not in output
    zero = run("estimate", write(zero_optimization={"stage": 1}), "--devices", "4", "--step").output
    assert shows(zero, "ZeRO", "stage 1")
    assert "no collectives per" in run("estimate", write(), "--devices", "1", "--step").output


def test_collectives_that_are_not_known_are_refused(write):
    result = run("estimate", write(pipe_parallel_size=2), "--devices", "2", "--step")
    assert result.exit_code == 2
    assert shows(result.output, "--step", "(pipe-parallel-size)")


def test_estimate_shows_parameters_tokens_and_memory(write):
    result = run("estimate", write(), "--devices", "8", "--device-memory", "40GiB")
    assert result.exit_code == 0
    assert cells(result.output, "parameters") == ["124,439,808"]
    assert cells(result.output, "head") == ["0", "tied to the embedding"]
    assert cells(result.output, "tokens per iteration") == [f"{4 * 8 * 8 * 1024:,}"]
    assert cells(result.output, "optimizer states")[0] == "1.39 GiB"  # 12 bytes of each parameter
    assert "\nfits: " in result.output


def test_an_estimate_for_cpus_has_no_memory_of_cuda(write):
    on_gpu = run("estimate", write(precision="fp32")).output
    on_cpu = run("estimate", write(precision="fp32"), "--cpu").output
    assert cells(on_gpu, "buffers") == ["1.00 GiB", "gradient buckets, and 1 GiB for CUDA and NCCL"]
    assert cells(on_cpu, "buffers") == ["0", "gradient buckets"]
    assert "CUDA" not in on_cpu


def test_estimate_reports_insufficient_memory_with_a_remedy(write):
    result = run("estimate", write(), "--device-memory", "2GiB")
    assert result.exit_code == 1
    assert "DOES NOT FIT" in result.output
    assert shows(result.output, "neox-config", "--devices 1 --device-memory", "2.00GiB")


def test_widths_that_are_slow_in_16_bits_are_noted_for_gpus(write):
    path = write(activation="swiglu", hidden_size=1000, num_attention_heads=5)
    result = run("estimate", path, "--vocab-size", "1001")
    rows = [line.strip() for line in result.stderr.splitlines()]
    assert [row for row in rows if row.startswith("set ")] == [
        "set mlp-width: 2688",
        "set make-vocab-size-divisible-by: 64",
    ]
    assert "make_vocab_size" not in run("estimate", path).stderr
    assert run("estimate", path, "--vocab-size", "1001", "--cpu").stderr == ""


def test_time_at_a_speed(write):
    result = run("estimate", write(), "--devices", "8", "--tflops", "50")
    # 6 x 123,532,032 multiplied + 12 x 12 x 768 x 1024 per token: 854.4 MFLOP; 262,144 tokens; 8 x 50 TFLOP/s
    assert cells(result.output, "operations per token")[0] == "854.44 MFLOP"
    # 6 x 12 x 768 x 1024 less.
    assert cells(result.output, "causal")[0] == "797.82 MFLOP"
    assert cells(result.output, "per iteration")[0] == "223.99 TFLOP"
    assert cells(result.output, "in total") == ["0.2 hours"]
    assert cells(result.output, "device-hours") == ["1"]
    by_mfu = run("estimate", write(), "--devices", "8", "--mfu", "0.5", "--peak-tflops", "100")
    assert by_mfu.output == result.output


def test_the_vocabulary_is_the_tokenizers_or_the_given_one_or_the_usual_one(write, tmp_path):
    assert shows(run("estimate", write()).output, "50,257", "GPT2BPETokenizer")
    assert "vocabulary 1,000 (given)" in run("estimate", write(), "--vocab-size", "1000").output
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "c": 2}))
    path = write(vocab_file=str(tmp_path / "vocab.json"))
    assert "vocabulary 3 (the" in run("estimate", path).output


def tokenizer(write, path, kind="HFTokenizer"):
    return load_config([write(tokenizer_type=kind, vocab_file=str(path))]).tokenizer


def test_added_tokens_of_a_tokenizer_file_count_once(write, tmp_path):
    path = tmp_path / "tokenizer.json"
    content = {"model": {"vocab": {"a": 0, "b": 1, "<end>": 2}}, "added_tokens": [{"content": "<end>"}]}
    content["added_tokens"].append({"content": "<pad>"})
    path.write_text(json.dumps(content))
    assert read_vocabulary_size(tokenizer(write, path)) == 4
    path.write_text(json.dumps({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}))
    assert read_vocabulary_size(tokenizer(write, path)) == 2
    assert read_vocabulary_size(tokenizer(write, tmp_path / "absent.json")) is None
    assert read_vocabulary_size(tokenizer(write, "unused", kind="CharLevelTokenizer")) == 512


@pytest.mark.parametrize(
    "content",
    ["not json", "[]", '{"model": {}}', '{"model": {"vocab": [1]}}', '{"model": {"vocab": {}}}'],
)
def test_a_malformed_tokenizer_file_is_refused(write, tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with refused(ConfigError, "not the vocabulary"):
        read_vocabulary_size(tokenizer(write, path))


def test_a_configuration_is_converted_to_a_shape_and_a_layout(write):
    settings = {
        "model_parallel_size": 2,
        "pipe_parallel_size": 2,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000, "overlap_comm": True},
        "checkpoint_activations": True,
        "checkpoint_num_layers": 3,
        "activation": "geglu",
        "norm": "rmsnorm",
        "pos_emb": "rotary",
        "no_weight_tying": True,
        "fp32_allreduce": True,
        "scaled_upper_triang_masked_softmax_fusion": True,
    }
    resolved = resolve(load_config([write(**settings)]), devices=8)
    setup = setup_of(resolved, vocab_size=50_257)
    layout, batch = setup.run.layout, setup.run.batch
    assert (layout.tensor, layout.stages, layout.data) == (2, 2, 2)
    assert (layout.zero, batch.micro, batch.accumulation) == (1, 4, 8)
    assert (setup.run.recomputation.segment, setup.bucket, setup.has_second_bucket) == (3, 1000, True)
    assert (setup.element_bytes, setup.reduced_bytes) == (2, 4)
    assert keeps_scores(setup.model.layers[0].mixer, setup.run)
    assert setup.entries == 50_257


def test_suggest_lists_layouts_and_the_settings_of_the_first(write):
    # The file's own layout would not divide these devices.
    path = write(model_parallel_size=4)
    result = run("suggest", path, "--devices", "6", "--device-memory", "40 GB", "--samples", "48")
    assert result.exit_code == 0
    assert "model-parallel-size: 1\n" in result.output
    assert "48 samples per" in result.output


def test_suggest_keeps_the_samples_of_the_file(write):
    result = run("suggest", write(), "--devices", "8", "--device-memory", "40GiB")
    assert "256 samples per" in result.output
    result = run("suggest", write(train_batch_size=512), "--devices", "16", "--device-memory", "40GiB")
    assert "512 samples per" in result.output


def test_suggest_fails_if_nothing_fits(write):
    result = run("suggest", write(), "--devices", "1", "--device-memory", "1GiB")
    assert result.exit_code == 1
    assert "nothing fits" in result.output


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GiB", 80 * 2**30), ("40 gb", 40 * 10**9), ("1.5MiB", 3 * 2**19), ("1TiB", 2**40)],
)
def test_memory_sizes_are_parsed(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "80 apples", "40"])
def test_malformed_sizes_are_refused(text):
    with refused(ValueError, "a memory size"):
        parse_bytes(text)


def test_a_malformed_size_is_a_usage_error(write):
    result = run("estimate", write(), "--device-memory", "many")
    assert result.exit_code == 2
    assert "it as 80GiB" in result.output


@pytest.mark.parametrize(
    "command", [("estimate",), ("suggest", "--devices", "8", "--device-memory", "40GiB")]
)
def test_a_wrong_configuration_ends_with_its_problems(write, command):
    name, *options = command
    result = run(name, write(warmpup=0.1), *options)
    assert result.exit_code == 2
    assert "mean warmup?" in result.stderr
    assert result.stdout == ""


def test_all_three_batch_sizes_determine_the_devices(write):
    result = run("estimate", write(train_batch_size=128))
    assert cells(result.output, "devices")[0] == "4"
    assert (
        "128 samples"
        in run("suggest", write(train_batch_size=128), "--devices", "8", "--device-memory", "9GiB").output
    )


def test_neox_config_has_both_commands():
    assert {"estimate", "suggest"} <= set(main.commands)


def test_a_dry_run_shows_the_same_estimate(write, monkeypatch):
    path = write(num_gpus=2)
    for gpus, options in ((2, []), (0, ["--cpu"])):
        monkeypatch.setattr(planning, "count_gpus", lambda *_, count=gpus: count)
        dry = CliRunner().invoke(neox_launch, ["--config", path, "--dry-run"], catch_exceptions=False)
        estimate = run("estimate", path, "--devices", "2", *options).stdout
        assert value_of(estimate, "samples per iteration")[-2].strip() == "64"
        assert estimate.rpartition("\n\n")[0] in dry.stdout


def test_the_command_that_verifies_the_layout_has_the_same_settings(write):
    path = write()
    last = run("estimate", path, "--devices", "2", "--set", "hidden-dropout=0").stdout.splitlines()[-1]
    assert last.endswith(f"neox-launch verify-layout {path} --set=hidden-dropout=0")
