"""`neox-config explain` answers names, words of other programs, and searches."""

import re

import pytest

from neox_config.describe.explain import explain
from neox_config.describe.search import search
from neox_config.errors import ConfigError
from neox_config.names import answers
from neox_config.schema.config import all_parameters, parameter_named
from support.refusals import refused, shows

NAMES = {parameter.name for parameter in all_parameters()}


def names_in(answer):
    """Return the parameters that an answer lists, describes or refers to."""
    also = re.findall(r"^See also: (.*)$", answer, re.MULTILINE)
    listed = re.findall(r"^ {0,2}([a-z][\w.<>]*)(?: |$)", answer, re.MULTILINE)
    return {*listed, *(name for line in also for name in line.split(", "))} & NAMES


def test_names_in_sentences_are_parameters():
    known = {*NAMES, "preprocess_data", "CUDA_VISIBLE_DEVICES", "max_tokens", "best_fit"}
    sentences = " ".join(found.sentence for found in answers("foreign").values())
    assert set(re.findall(r"\w+_\w+", sentences)) <= known


def test_every_word_finds_all_its_parameters():
    for word, found in answers("foreign").items():
        answer = explain(word)
        assert set(found.parameters) <= names_in(answer), word
        assert found.sentence in answer, word


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("rope", "rotary_emb_base"),
        ("flash", "attention_config"),
        ("gqa", "num_kv_heads"),
        ("swiglu", "activation"),
        ("epochs", "train_epochs"),
        ("dtype", "precision"),
        ("batch size", "train_micro_batch_size_per_gpu"),
        ("warmup steps", "warmup_iters"),
        ("weight decay", "weight_decay"),
        ("Dropout", "hidden_dropout"),
        ("FSDP", "zero_optimization.stage"),
        ("context length", "seq_length"),
        ("checkpointing", "checkpoint_activations"),
        ("resume", "load"),
        ("tensor parallel", "model_parallel_size"),
        ("seed", "seed"),
        ("eos", "eod_mask_loss"),
        ("vocabulary", "vocab_file"),
        ("ddp", "train_batch_size"),
        ("cosine", "lr_decay_style"),
        *((name, "optimizer.type") for name in ("lamb", "lion", "muon", "sm3")),
        ("clip", "gradient_clipping"),
        ("--num-layers", "num_layers"),
        ("Learning Rate", "optimizer.params.lr"),
        ("rope_theta", "rotary_emb_base"),
        ("stage", "zero_optimization.stage"),
        ("ddp_impl", None),
        ("lora", "lora_rank"),
        ("adapter", "lora_base"),
        ("qlora", None),
        ("mlp_type", None),
        ("eos_token_id", "stop_tokens"),
        ("chat_template", "serve.chat_template"),
        ("push_to_hub", None),
        ("min_p", None),
        ("per_device_eval_batch_size", None),
    ],
)
def test_words_find_parameters_or_a_sentence(words, expected):
    found = names_in(explain(words))
    assert expected in found if expected else not found


def test_names_of_gpt_neox_that_are_refused_get_the_reason():
    for name, found in answers("features").items():
        assert explain(name) == f"{name} {found.sentence}; {found.remedy}"
    assert shows(explain("mixture of experts"), "moe_num_experts")


def test_every_name_is_answered_by_itself():
    for name in NAMES:
        assert f"{name}\n  {parameter_named(name).doc}" in explain(name.replace("_", "-"))


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("page locked", "zero_optimization.offload_param.pin_memory"),
        ("nvlink", "detect_nvlink_pairs"),
        ("bigbird", "attention_config"),
        ("bucket size", "zero_optimization.allgather_bucket_size"),
        ("perplexity per character", "char_level_ppl"),
        ("libaio", "zero_optimization.offload_param.device"),
    ],
)
def test_the_search_puts_the_most_relevant_first(text, first):
    assert search(text, every_word=True)[0].name == first
    lines = explain(text).splitlines()
    assert shows(lines[0], f"{text} is not")
    assert lines[2].split()[0] == first


def test_names_weigh_more_than_documentation():
    hits = [hit.name for hit in search("bucket", every_word=True)]
    assert hits.index("rpe_num_buckets") < hits.index("rpe_max_distance")


def test_words_that_nothing_contains_together_find_each_alone():
    assert search("libaio zebra", every_word=True) == []
    assert search("libaio zebra", every_word=False)[0].name == "zero_optimization.offload_param.device"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("rotary-pc", ["rotary-pc", "rotary_pct?"]),
        ("swigluu", ["swigluu", "swiglu?"]),
        ("zzzz", ["zzzz", "neox-config docs"]),
        ("", ['""', "neox-config docs"]),
        ("the of", ["the of", "neox-config docs"]),
        ("zz\x1b[zz\udcff", [r'"zz\u001b[zz\udcff"', "neox-config docs"]),
        ("z" * 100_000, [f"{'z' * 57}...", "neox-config docs"]),
    ],
)
def test_nothing_found_gets_the_nearest_names(text, values):
    with refused(ConfigError, *values, code="unknown-parameter"):
        explain(text)


def test_long_lists_are_cut_and_counted():
    lines = explain("enabled").splitlines()
    inside = [name for name in NAMES if name.endswith(".enabled")]
    assert shows(lines, f"and {len(inside) - 10} more")
    assert len(lines) == 15
