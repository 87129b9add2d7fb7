"""The run that `neox-launch init` chooses, and its configuration."""

from dataclasses import replace
from pathlib import Path

import pytest

from neox_config import Text, load_config, resolve
from neox_config.catalogue import model_names
from neox_config.errors import LaunchError
from neox_config.estimate.resolved import estimate_resolved
from neox_launcher.init.configuration import configuration_text
from neox_launcher.init.sizes import SIZES, of_catalogue, of_size
from neox_launcher.init.texts import Prepared
from neox_launcher.init.training import Devices, choose_training
from support.refusals import refused
from support.tiers import slow_except

GIB = 2**30
CPU = Devices(count=1, memory=16 * GIB, are_gpus=False)
LARGE = replace(CPU, memory=128 * GIB)
GPUS = Devices(count=8, memory=80 * GIB, are_gpus=True)
ALL = [of_size(name) for name in SIZES]


def prepared(tokens: int, entries: int = 8192) -> Prepared:
    return Prepared(
        data_path="/the $data/corpus_text_document",
        split="95,5,0",
        vocab_file="/the $data/tokenizer.json",
        tokenizer_type="HFTokenizer",
        entries=entries,
        training_tokens=tokens,
        validation_tokens=tokens // 20,
    )


def configured(training, texts, devices):
    text = configuration_text(Path("/my $run/config.yml"), training, texts, devices)
    config = load_config([], texts=(Text(text, "config.yml", has_lines=True),))
    assert (config.data.data_path, config.tokenizer.vocab_file) == (texts.data_path, texts.vocab_file)
    assert (config.checkpoint.save, config.logging.log_dir) == ("/my $run/checkpoints", "/my $run")
    return config


@pytest.mark.parametrize(
    ("tokens", "devices", "size"),
    [
        (10_000, CPU, "1m"),
        # 20 x 5.3 million parameters are more than 4 x 26 million tokens, but fewer than 4 x 27 million.
        (26_000_000, CPU, "1m"),
        (27_000_000, CPU, "3m"),
        (27_000_000, GPUS, "3m"),
        # Operations limit a CPU.
        (10_000_000_000, CPU, "3m"),
        (1_000_000_000, GPUS, "85m"),
        (100_000_000_000, GPUS, "300m"),
    ],
)
def test_the_size_follows_from_the_tokens_and_the_devices(tokens, devices, size):
    training = choose_training(ALL, prepared(tokens), devices)
    assert training.candidate.name == size


def test_the_length_is_limited_by_texts_parameters_and_operations():
    few, many = prepared(1_000_000), prepared(10**10)
    short, long = (choose_training([of_size("3m")], texts, GPUS) for texts in (few, many))
    assert 3.9 < short.tokens / 1_000_000 <= 4
    assert 19.9 < long.tokens / long.parameters <= 20
    limited = choose_training([of_size("3m")], many, CPU)
    assert 1.99e14 < limited.operations <= 2e14
    assert (short.limit, long.limit, limited.limit) == (
        *("4 passes over the texts", "20 tokens per parameter"),
        "2e+14 operations on these devices",
    )


@pytest.mark.parametrize("devices", [LARGE, replace(LARGE, count=2), GPUS, replace(GPUS, count=3)])
@pytest.mark.parametrize("name", SIZES)
def test_every_size_has_a_valid_configuration_with_the_figures_that_are_reported(name, devices):
    texts = prepared(5_000_000)
    training = choose_training([of_size(name)], texts, devices)
    resolved = resolve(configured(training, texts, devices), devices=devices.count)
    found, _ = estimate_resolved(resolved, vocab_size=texts.entries, device=devices.type)
    assert found.total_parameters == training.parameters
    assert found.setup.samples == training.setup.samples
    assert max(each.total for each in found.memory) == training.memory
    assert resolved.config.training.train_iters == training.iterations
    tokens = found.tokens_per_iteration * training.iterations
    assert (tokens, found.flops_per_iteration * training.iterations) == (
        training.tokens,
        training.operations,
    )
    assert training.memory * (1 if devices.are_gpus else devices.count) <= devices.memory
    assert resolved.config.data.data_path == "/the $data/corpus_text_document"


# One of each older family, and those of the others with the most settings.
FAST = (
    *("gpt-neox-20b", "pythia-1b", "gpt2-medium", "llama-3.2-1b", "mistral-7b-v0.3", "qwen2-7b"),
    *("olmo-3-7b", "gemma-3-1b"),
)


@pytest.mark.parametrize(
    "name", slow_except([each for each in model_names() if "72b" not in each and "70b" not in each], *FAST)
)
def test_a_model_of_the_catalogue_keeps_its_architecture(name):
    texts, candidate = prepared(100_000_000), of_catalogue(name)
    devices = replace(GPUS, count=64)
    training = choose_training([candidate], texts, devices)
    config = configured(training, texts, devices)
    rest = (
        f"seq-length: {training.seq_length}\ntrain-iters: 1\ntrain-micro-batch-size-per-gpu: 1\n"
        "optimizer: {type: Adam, params: {lr: 0.1}}\nhidden-dropout: 0.0\nattention-dropout: 0.0\n"
    )
    written = load_config([], texts=(Text(candidate.architecture, name), Text(rest, "training")))
    assert (config.attention, config.model) == (written.attention, written.model)
    assert training.seq_length == 1024


def test_a_model_that_does_not_fit_is_refused():
    with refused(LaunchError, "llama-2-70b", "8 GPUs", "80.0 GiB", code="does-not-fit"):
        choose_training([of_catalogue("llama-2-70b")], prepared(10**9), GPUS)
    with refused(LaunchError, "1.2b", "1 process", "CPU", code="does-not-fit"):
        choose_training([of_size("1.2b")], prepared(10**9), replace(CPU, memory=8 * GIB))


def test_short_texts_have_short_samples_and_too_short_ones_are_refused():
    assert choose_training(ALL, prepared(8 * 257), CPU).seq_length == 256
    assert choose_training(ALL, prepared(8 * 257 - 1), CPU).seq_length == 128
    tiny = choose_training(ALL, prepared(8 * 17), CPU)
    assert (tiny.seq_length, tiny.setup.samples) == (16, 1)
    with refused(LaunchError, "135 tokens", "8 samples", "16 require", code="too-few-tokens"):
        choose_training(ALL, prepared(8 * 17 - 1), CPU)


def test_without_validation_texts_nothing_is_evaluated():
    texts = replace(prepared(100_000), validation_tokens=0, split="1,0,0")
    config = configured(choose_training(ALL, texts, CPU), texts, CPU)
    assert config.training.eval_iters == 0


@pytest.mark.parametrize(
    ("iterations", "batches", "interval", "evaluated"),
    [
        # 0.3 batches per iteration: 10, for an evaluation in the middle and one at the end.
        (36, 100, 18, 5),
        (37, 100, 19, 5),
        # Few validation texts are evaluated more often.
        (36, 1, 4, 1),
        (36, 2, 8, 2),
        (1000, 100, 100, 10),
        (100_000, 100, 10_000, 10),
        # At least one in the middle.
        (2, 100, 1, 1),
        (1, 100, 1, 1),
    ],
)
def test_evaluations_take_a_tenth_of_the_time_at_most(iterations, batches, interval, evaluated):
    texts = prepared(10**8)
    training = replace(
        choose_training([of_size("1m")], texts, CPU), iterations=iterations, validation_batches=batches
    )
    config = configured(training, texts, CPU).training
    assert (config.eval_interval, config.eval_iters) == (interval, evaluated)
    counted = sum(number % interval == 0 for number in range(1, iterations)) + 1
    assert training.evaluation_share == pytest.approx(counted * evaluated / 3 / iterations)
    assert training.evaluation_share <= 0.1 or iterations < 7


def test_the_validation_batches_are_those_of_the_texts():
    training = choose_training([of_size("1m")], prepared(10**6), CPU)
    assert training.validation_batches == -(-50_000 // (training.setup.samples * training.seq_length))
