"""Checkpoints in GPT-NeoX's layouts become the models of transformers from which they were written."""

import hashlib
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner

from neox_config import load_config
from neox_model.checkpoint.contents import Manifest
from neox_model.convert import from_neox as importing
from neox_model.convert.checkpoints import Checkpoint, build_sequential, load_into
from neox_model.convert.cli import main
from neox_model.convert.errors import ConversionError, ProofError
from neox_model.convert.from_neox import from_neox
from neox_model.convert.neox import files as stored_files
from neox_model.convert.neox import proof, tensors
from neox_model.convert.neox.records import Arguments, read_record
from neox_model.convert.neox.tensors import order_of
from support.hf_models import ENTRIES
from support.neox_checkpoints import argument_objects, gpt2, llama, pythia, write_neox
from support.refusals import refused, shows

SOURCES = {
    "parallel": pythia,
    "sequential residual, tied": lambda: pythia(parallel=False, tied=True, pct=1.0),
    "grouped": llama,
    "grouped, by head": lambda: llama(order="per-head"),
    "grouped, biases": lambda: llama(has_bias=True),
    "grouped, by head, biases": lambda: llama(order="per-head", has_bias=True),
    "grouped, w1 w2 w3": lambda: llama(order="per-head", apart=True),
    "one key": lambda: llama(shared=4, order="per-head"),
    "Llama, w1 w2 w3": lambda: llama(shared=1, apart=True),
    "Llama, linear1": lambda: llama(shared=1),
    "learned": gpt2,
}


def assert_same_logits(source, folder, *, model=None, limit=1e-5):
    """Compare logits with those of transformers, on whole sequences."""
    tokens_BS = torch.randint(ENTRIES, (2, 32), generator=torch.Generator().manual_seed(3))
    checkpoint = Checkpoint(folder)
    ours = build_sequential(checkpoint.model, checkpoint.resolved.run, checkpoint.vocab_size)
    load_into(ours, checkpoint, torch.float32)
    with torch.no_grad():
        here, there = ours(tokens_BS), (model or source.model)(tokens_BS).logits
    assert float((here - there).abs().max() / there.abs().max()) < limit


@pytest.mark.parametrize(
    ("kind", "ranks", "layout"),
    [
        *((kind, 2, "2.0") for kind in SOURCES if kind != "one key"),
        ("one key", 1, "2.0"),
        ("parallel", 1, "1.0"),
        ("grouped", 2, "1.0"),
        ("parallel", 2, "sequential"),
        ("grouped", 1, "sequential"),
    ],
)
def test_logits_are_those_of_transformers(tmp_path, kind, ranks, layout):
    source = SOURCES[kind]()
    write_neox(tmp_path / "theirs", source, ranks=ranks, layout=layout)
    result = from_neox(tmp_path / "theirs", tmp_path / "ours", qkv_order=source.qkv_order)
    assert_same_logits(source, tmp_path / "ours" / "global_step30")
    assert (tmp_path / "ours" / "latest").read_text().strip() == "global_step30"
    assert Manifest.read(tmp_path / "ours" / "global_step30").iteration == 30
    assert result == json.loads((tmp_path / "ours" / "verification.json").read_text())
    assert result["tensors_read"] == ranks * sum(map(len, source.layers.values()))
    assert result["tensor_parallel_ranks"] == ranks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["parallel", "sequential residual, tied", "grouped, by head, biases"])
def test_ranks_of_16_bits_are_converted(tmp_path, kind, dtype):
    source = SOURCES[kind]()
    write_neox(tmp_path / "theirs", source, ranks=2, dtype=dtype)
    from_neox(tmp_path / "theirs", tmp_path / "ours", qkv_order=source.qkv_order)
    checkpoint = Checkpoint(tmp_path / "ours" / "global_step30")
    if kind == "parallel":  # Each rank has its own bias, rounded; the sum is rounded once more.
        whole = source.layers[2]["attention.dense.bias"]
        summed = ((whole * 0.75).to(dtype).double() + (whole * 0.25).to(dtype).double()).to(dtype)
        assert torch.equal(checkpoint.whole("layers.0.attention.dense.bias"), summed)
    assert_same_logits(source, tmp_path / "ours" / "global_step30", limit=0.05)


def test_weights_of_16_bits_keep_their_bits(tmp_path):
    source = pythia()
    write_neox(tmp_path / "theirs", source, dtype=torch.bfloat16)
    from_neox(tmp_path / "theirs" / "global_step30", tmp_path / "ours")
    checkpoint = Checkpoint(tmp_path / "ours" / "global_step30")
    for name, stored in {
        "embedding.word_embeddings.weight": source.layers[0]["word_embeddings.weight"],
        "layers.1.attention.qkv.weight": source.layers[3]["attention.query_key_value.weight"],
        "lm_head.weight": source.layers[6]["final_linear.weight"],
    }.items():
        assert torch.equal(checkpoint.whole(name), stored.to(torch.bfloat16))
    assert load_config([tmp_path / "ours" / "model.yml"]).precision.precision == "bfloat16"


def test_what_a_library_allows_torch_to_load_changes_nothing(tmp_path):
    """As accelerate and transformers allow numpy's functions."""
    write_neox(tmp_path / "theirs", pythia())
    others = [np.zeros(1).__reduce__()[0], np.ndarray]
    with torch.serialization.safe_globals(others):
        from_neox(tmp_path / "theirs" / "global_step30", tmp_path / "ours")
        assert set(torch.serialization.get_safe_globals()) >= set(others)


@pytest.mark.parametrize("passes", [False, True])
def test_a_training_continues_if_its_learning_rate_does_not_depend_on_data(tmp_path, passes):
    source = pythia()
    if passes:
        del source.config["train_iters"]
        source.config["train_epochs"] = 2
    write_neox(tmp_path / "theirs", source)
    from_neox(tmp_path / "theirs", tmp_path / "ours")
    manifest = json.loads((tmp_path / "ours" / "global_step30" / "manifest.json").read_text())
    contents = manifest["contents"]
    assert_same_logits(source, tmp_path / "ours" / "global_step30")
    if passes:
        assert [contents[name] for name in ("training", "engine", "schedule")] == [{}, {}, {}]
    else:
        assert contents["training"]["samples"] == 120
        assert contents["schedule"]["curve"]["decay_iterations"] == 100


@pytest.mark.parametrize(("kind", "is_warned"), [("grouped", True), ("parallel", False)])
def test_the_formula_of_rmsnorm_is_logged(tmp_path, caplog, kind, is_warned):
    converted(tmp_path, SOURCES[kind]())
    assert ("since commit 4c9f108 (9 May 2025)" in caplog.text) is is_warned
    assert shows(caplog.text, "were not converted")


def test_padding_of_the_vocabulary_is_left_out_on_request(tmp_path):
    source = pythia()
    write_neox(tmp_path / "theirs", source, ranks=2)
    from_neox(tmp_path / "theirs", tmp_path / "ours", trim_vocab=True)
    checkpoint = Checkpoint(tmp_path / "ours" / "global_step30")
    assert torch.equal(checkpoint.whole("lm_head.weight"), source.layers[6]["final_linear.weight"][:ENTRIES])


def test_chunks_of_nothing_but_padding_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_files, "CHUNK", 3 * 32)
    source = pythia()
    write_neox(tmp_path / "theirs", source, ranks=2)
    from_neox(tmp_path / "theirs", tmp_path / "ours", trim_vocab=True)
    checkpoint = Checkpoint(tmp_path / "ours" / "global_step30")
    assert torch.equal(
        checkpoint.whole("embedding.word_embeddings.weight"),
        source.layers[0]["word_embeddings.weight"][:ENTRIES],
    )


def rewrite(path, change):
    record = torch.load(path, weights_only=False)
    change(record)
    torch.save(record, path)


def converted(folder, source=None, **options):
    """Convert a checkpoint, changed by `change`, of two ranks."""
    change, named = options.pop("change", None), options.pop("file", None)
    source = source or pythia()
    write_neox(folder / "theirs", source, **{"ranks": 2, **options})
    if change is not None:
        rewrite(folder / "theirs" / "global_step30" / named, change)
    return from_neox(folder / "theirs", folder / "ours", qkv_order=source.qkv_order)


FIRST, RANK = "layer_02-model_00-model_states.pt", "mp_rank_00_model_states.pt"


def test_stored_constants_are_compared_and_left_out(tmp_path):
    rates = 10000.0 ** -(torch.arange(0, 2, 2) / 2)
    source = pythia()
    for layer in (2, 3):
        source.layers[layer]["attention.rotary_emb.inv_freq"] = rates.half()
    result = converted(tmp_path, source)
    assert result["constants_compared"] == [
        "attention.rotary_emb.inv_freq of layer 02", "attention.rotary_emb.inv_freq of layer 03"
    ]  # fmt: skip


def test_another_rotary_base_shows_in_stored_constants(tmp_path):
    source = pythia(pct=1.0)
    rates = 9000.0 ** -(torch.arange(0, 8, 2) / 8)
    source.layers[2]["attention.rotary_emb.inv_freq"] = rates
    with refused(ConversionError, "inv_freq", "layer 02", "rotary-emb-base"):
        converted(tmp_path, source)


COPIED = ("input_layernorm.", "post_attention_layernorm.", "norm.", "position_embeddings.")


def drifted(folder, source, *, dtype=torch.float32, biases=(), **options):
    """Convert a checkpoint of two ranks whose copies are 1/8 above and below the model's."""
    write_neox(folder / "theirs", source, ranks=2, dtype=dtype)
    count = 0
    for path in sorted((folder / "theirs" / "global_step30").glob("layer_*")):
        record = torch.load(path)
        for name in record:
            if name.startswith((*COPIED, *biases)):
                record[name] += 0.125 if "model_00" in path.name else -0.125
                count += 1
        torch.save(record, path)
    return from_neox(folder / "theirs", folder / "ours", **options), count // 2


@pytest.mark.parametrize(
    ("kind", "biases"),
    [
        ("parallel", ()),
        ("sequential residual, tied", ("attention.dense.bias", "mlp.dense_4h_to_h.bias")),
        ("learned", ("attention.dense.bias", "mlp.dense_4h_to_h.bias")),
    ],
)
def test_copies_that_drifted_apart_are_averaged_on_request(tmp_path, caplog, kind, biases):
    """The mean is the model; each copy alone is another one."""
    source = SOURCES[kind]()
    result, count = drifted(tmp_path, source, biases=biases, average_copies=True)
    assert_same_logits(source, tmp_path / "ours" / "global_step30")
    found = result["averaged_copies"]
    assert found["tensors"] == count == len(found["largest_difference_by_tensor"])
    assert found["largest_difference"] == pytest.approx(0.25, abs=1e-6)
    assert shows(caplog.text, count, "to 0.25")


def test_copies_of_16_bits_are_averaged_and_rounded_once(tmp_path):
    source = pythia()
    result, count = drifted(tmp_path, source, dtype=torch.bfloat16, average_copies=True)
    stored = source.layers[5]["norm.weight"].bfloat16()
    expected = ((stored + 0.125).double() + (stored - 0.125).double()) / 2
    written = Checkpoint(tmp_path / "ours" / "global_step30").whole("final_norm.weight")
    assert torch.equal(written, expected.bfloat16())
    assert result["averaged_copies"]["tensors"] == count


def test_copies_that_drifted_apart_are_refused_without_the_option(tmp_path):
    with refused(ConversionError, "to 0.25", "--average-copies"):
        drifted(tmp_path, pythia())
    assert not (tmp_path / "ours").exists()


def test_equal_copies_are_not_changed_by_the_option(tmp_path):
    write_neox(tmp_path / "theirs", pythia(), ranks=2)
    done = command(tmp_path, "--average-copies")
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "ours" / "verification.json").read_text())
    assert result["averaged_copies"]["tensors"] == 0


@pytest.mark.parametrize("wrong", [lambda copies: copies[0], lambda copies: copies.sum(0)])
def test_a_wrong_mean_is_found(tmp_path, monkeypatch, wrong):
    def common(files, key):
        return wrong(torch.stack([files.whole(key, rank) for rank in range(files.ranks)]))

    monkeypatch.setattr(stored_files.NeoXFiles, "common", common)
    with refused(ProofError, "the same model"):
        drifted(tmp_path, pythia(), average_copies=True)


def drop(name):
    return lambda record: record.pop(name)


def put(name, value):
    return lambda record: record.update({name: value})


ENDLESS: dict[str, list[object]] = {}
ENDLESS["x"] = [ENDLESS]


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (FIRST, drop("mlp.dense_h_to_4h.bias"), ("mlp.dense_h_to_4h.bias", "layer 02", "rank 0")),
        (FIRST, put("attention.extra", torch.ones(2)), ("attention.extra", "layer 02", "rank 1")),
        (FIRST, put("input_layernorm.weight", torch.zeros(32)), ("weight", "layer 02", "the same")),
        (FIRST, put("attention.dense.weight", torch.zeros(32, 17)), ("32", "17", "rank 0")),
        (FIRST, put("attention.dense.weight", torch.zeros(32, 16).half()), ("different dtypes",)),
        (FIRST, put("attention.dense.weight", torch.full((32, 16), float("nan"))), ("not finite",)),
        (FIRST, put("mlp._extra_state", None), ("mlp._extra_state", "TransformerEngine")),
        (RANK, put("iteration", 31), ("mp_rank_01_model_states.pt", "iteration")),
        (RANK, put("args", {"num_layers": 2}), ("another args",)),
        (RANK, put("args", {"num_layers": torch.ones(2)}), ("mp_rank_01_model_states.pt", "args")),
        (RANK, put("args", ENDLESS), ("args", "not plain")),
    ],
)  # fmt: skip
def test_files_that_do_not_belong_together_are_refused(tmp_path, file, change, message):
    with refused(ConversionError, *message):
        converted(tmp_path, file=file, change=change)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layer_03-model_01-model_states.pt", ("layer 03", "rank 1", "of 2")),
        ("mp_rank_00_model_states.pt", ("mp_rank_00",)),
        ("configs/model.yml", ("configuration", "--config")),
    ],
)
def test_a_missing_file_is_named(tmp_path, name, message):
    write_neox(tmp_path / "theirs", pythia(), ranks=2)
    (tmp_path / "theirs" / "global_step30" / name).unlink()
    with refused(ConversionError, *message):
        from_neox(tmp_path / "theirs", tmp_path / "ours")


def test_missing_layers_and_additional_ones_are_named(tmp_path):
    source = pythia()
    source.layers[4] = source.layers.pop(3)
    with refused(ConversionError, "layer 03"):
        converted(tmp_path / "a", source)
    source = pythia()
    source.layers[7] = {"final_linear.weight": source.layers[6]["final_linear.weight"]}
    with refused(ConversionError, "final_linear.weight", "layer 07"):
        converted(tmp_path / "b", source)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_size": 64}, ("hidden_size", "64", "has 32")),
        ({"model_parallel_size": 4}, ("model_parallel_size", "4", "have 2")),
        ({"padded_vocab_size": 512}, ("padded_vocab_size", "512", "have 288")),
        ({"memory_size": 3}, ("memory_size", "3")),
    ],
)
def test_recorded_arguments_are_compared(tmp_path, arguments, message):
    with refused(ConversionError, *message):
        converted(tmp_path, changes={"args": arguments})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"norm": "rmsnorm"}, ("input_layernorm.bias", "layer 02")),
        ({"no_weight_tying": False}, ("final_linear.weight", "layer 06")),
        ({"attention_sinks": True}, ("attention-sinks", "GPT-NeoX")),
        ({"num_kv_heads": 2}, ("attention.query_key_value", "layer 02", "48")),
        ({"use_bias_in_mlp": False}, ("use-bias-in-mlp", "GPT-NeoX")),
        ({"pos_emb": "learned"}, ("position_embeddings.weight", "layer 00")),
        ({"activation": "swiglu", "intermediate_size": 600}, ("has the shape",)),
        ({"apply_residual_connection_post_layernorm": True}, ("apply-residual-connection-post-layernorm",)),
        ({"attention_sinks": True}, ("attention-sinks",)),
        ({"num_layers": 3}, ("num_layers", "2", "has 3")),
    ],
)  # fmt: skip
def test_a_configuration_of_another_model_is_refused(tmp_path, settings, message):
    write_neox(tmp_path / "theirs", pythia(), ranks=2, configs=False)
    config = tmp_path / "model.yml"
    config.write_text(yaml.safe_dump(pythia().config | {"model_parallel_size": 2} | settings))
    with refused(ConversionError, *message):
        from_neox(tmp_path / "theirs", tmp_path / "ours", config=[config])


def test_heads_that_ranks_cannot_divide_are_refused(tmp_path):
    with refused(ConversionError, "2", "tensor-parallel", "num-kv-heads", "1"):
        converted(tmp_path, llama(shared=4))


def command(folder, *arguments):
    theirs, ours = str(folder / "theirs"), str(folder / "ours")
    return CliRunner().invoke(main, ["from-neox", theirs, "--output", ours, *arguments])


def test_the_order_of_shared_keys_must_be_stated_where_nothing_shows_it(tmp_path):
    write_neox(tmp_path / "theirs", llama(order="per-head"), ranks=2)
    done = command(tmp_path)
    assert done.exit_code == 2
    assert shows(done.output, "num_kv_heads", "2", "GPT-NeoX", "query_key_value")
    assert shows(done.output, "--qkv-order", "96c242e")
    assert not (tmp_path / "ours").exists()
    done = command(tmp_path, "--qkv-order", "per-head")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "ours" / "verification.json").read_text())["qkv_order"] == "per-head"


@pytest.mark.parametrize(("stored", "stated"), [("per-head", "separate"), ("separate", "per-head")])
def test_another_order_is_another_model(tmp_path, stored, stated):
    """The stated order decides: nothing in the files shows the right one."""
    source = llama(order=stored)
    write_neox(tmp_path / "theirs", source, ranks=2)
    assert from_neox(tmp_path / "theirs", tmp_path / "ours", qkv_order=stated)["qkv_order"] == stated
    with pytest.raises(AssertionError):
        assert_same_logits(source, tmp_path / "ours" / "global_step30", limit=1e-2)


def test_an_order_without_effect_is_refused(tmp_path):
    write_neox(tmp_path / "theirs", llama(shared=1))
    with refused(ConversionError, "--qkv-order"):
        from_neox(tmp_path / "theirs", tmp_path / "ours", qkv_order="separate")


def test_the_order_of_older_versions_is_known_from_their_names(tmp_path):
    source = SOURCES["grouped, w1 w2 w3"]()
    write_neox(tmp_path / "theirs", source)
    with refused(ConversionError, "--qkv-order", "September 2024"):
        from_neox(tmp_path / "theirs", tmp_path / "ours", qkv_order="separate")
    assert from_neox(tmp_path / "theirs", tmp_path / "ours")["qkv_order"] == "per-head"


def test_an_order_that_cannot_divide_a_head_is_refused(tmp_path):
    files = SimpleNamespace(folder=tmp_path, parts={})
    attention = SimpleNamespace(heads=6, kv_heads=2, head_width=8)
    with refused(ConversionError, "has 8", "and 3"):
        order_of(files, attention, None)


@pytest.mark.parametrize("order", ["separate", "per-head"])
def test_ranks_that_do_not_divide_the_width_of_a_head(tmp_path, order):
    """Four ranks, and heads of six channels: the rows of a rank are whole heads."""
    files = SimpleNamespace(ranks=4, parts={}, whole=lambda key, rank: rows[rank])
    attention = SimpleNamespace(heads=8, kv_heads=4, head_width=6, query_width=48, key_width=24)
    queries, keys, values = torch.arange(48), 100 + torch.arange(24), 200 + torch.arange(24)
    if order == "separate":
        rows = [torch.cat([each.chunk(4)[rank] for each in (queries, keys, values)]) for rank in range(4)]
        joined = tensors.GROUPED.values(files, None, attention)
    else:
        heads = [torch.cat([each.chunk(8)[head] for each in (queries, keys, values)]) for head in range(8)]
        rows = [torch.cat(heads[2 * rank : 2 * rank + 2]) for rank in range(4)]
        joined = tensors.GROUPED_PER_HEAD.values(files, None, attention)
    groups = [
        torch.cat([queries[12 * group :][:12], keys[6 * group :][:6], values[6 * group :][:6]])
        for group in range(4)
    ]
    assert torch.equal(joined, torch.cat(groups))


def test_an_argument_object_becomes_a_dictionary_and_gives_the_configuration(tmp_path):
    source = pythia()
    with argument_objects() as kind:
        arguments = kind()
        arguments.__dict__ |= source.config | {"padded_vocab_size": ENTRIES + 8, "model_parallel_size": 2}
        write_neox(tmp_path / "theirs", source, ranks=2, configs=False, changes={"args": arguments})
    recorded = read_record(tmp_path / "theirs" / "global_step30" / RANK)["args"]
    assert type(recorded) is Arguments
    assert recorded["rotary_pct"] == 0.25
    from_neox(tmp_path / "theirs", tmp_path / "ours")
    assert_same_logits(source, tmp_path / "ours" / "global_step30")


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("file", [FIRST, RANK])
def test_code_in_a_file_does_not_run_and_is_named(tmp_path, file):
    with refused(ConversionError, "posix.mkdir"):
        converted(tmp_path, file=file, change=put("more", Malicious(tmp_path / "ran")))
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "theirs" / "global_step30" / file, weights_only=False)
    assert (tmp_path / "ran").is_dir()  # The file does harm where it is unpickled.


def test_an_allowed_name_runs_nothing(tmp_path):
    class Other:
        def __reduce__(self):
            return torch.nn.Module, ()

    torch.save({"more": Other()}, tmp_path / "file.pt")
    with refused(ConversionError, "torch.nn.modules.module.Module"):
        read_record(tmp_path / "file.pt")


def test_files_that_are_not_archives_of_torch_are_refused(tmp_path):
    torch.save({"one": torch.ones(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"one": torch.ones(1)}, tmp_path / "file.pt")
    shutil.unpack_archive(tmp_path / "file.pt", tmp_path / "parts", "zip")
    shutil.make_archive(str(tmp_path / "compressed"), "zip", tmp_path / "parts")
    reasons = {
        "old.pt": "not a zip file",
        "compressed.zip": "compressed after it was saved",
        "missing.pt": "No such",
    }
    for name, reason in reasons.items():
        with refused(ConversionError, "version 1.6", reason):
            read_record(tmp_path / name)


@pytest.mark.parametrize(
    ("kind", "join", "wrong"),
    [
        ("parallel", "ROWS", lambda files, key, a: torch.cat(tensors._parts(files, key)).flip(0)),
        ("parallel", "COLUMNS", lambda files, key, a: torch.cat(tensors._parts(files, key)[::-1], 1)),
        ("parallel", "SUM", lambda files, key, a: tensors._parts(files, key)[0]),
        ("parallel", "COPIES", lambda files, key, a: files.common(key).roll(1)),
        ("grouped", "GROUPED", lambda files, key, a: tensors._grouped(files, key, a).roll(8, 0)),
        (
            "grouped, by head",
            "GROUPED_PER_HEAD",
            lambda files, key, a: tensors._per_head(files, key, a).roll(8, 0),
        ),
        ("grouped, by head", "GROUPED_PER_HEAD", lambda files, key, a: tensors._grouped(files, key, a)),
        ("grouped", "FIRST_HALF", tensors._half(1)),
    ],
)
def test_a_wrong_join_is_found_before_anything_is_written(tmp_path, monkeypatch, kind, join, wrong):
    right = getattr(tensors, join)
    monkeypatch.setattr(tensors, join, tensors.Join(right.part, wrong))
    with refused(ProofError, "the same model"):
        converted(tmp_path, SOURCES[kind]())
    assert not (tmp_path / "ours").exists()


def _rows_of_rank(tensor, rank, ranks):
    return tensor.chunk(ranks)[rank]


def other(folder, *, ranks, **settings):
    """Convert a checkpoint of random weights, for options that transformers does not have."""
    source = gpt2()
    source.config |= settings
    heads = settings.get("num_attention_heads", 4)
    del source.layers[0]["position_embeddings.weight"]
    generator = torch.Generator().manual_seed(5)
    for number in (2, 3, 5):
        layer, norm = source.layers[number], settings.get("norm", "layernorm")
        if number != 5 and settings.get("use_qk_layernorm"):
            for kind in ("weight", "bias"):
                by_head = torch.randn(heads, 32 // heads, generator=generator)
                layer[f"attention.qk_layernorm.{kind}"] = by_head
            for kind in ("weight", "bias", "scale"):
                source.by_rank[f"attention.qk_layernorm.{kind}"] = _rows_of_rank
        for name in [name for name in layer if "norm" in name and norm != "layernorm"]:
            stem, _, kind = name.rpartition(".")
            values = layer.pop(name)
            if kind == "weight" and norm == "scalenorm":
                layer[f"{stem}.g"] = torch.full((1,), 0.7)
            elif kind == "weight" and norm == "rmsnorm":
                layer[f"{stem}.scale"] = values
        if number != 5 and settings["pos_emb"] == "rpe":
            layer["attention.rpe.weight"] = torch.randn(32, heads, generator=generator)
        if number != 5 and settings["pos_emb"] == "alibi":
            layer["attention.alibi_embed.slopes"] = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)
    return converted(folder, source, ranks=ranks)


@pytest.mark.parametrize(
    "settings",
    [
        {"pos_emb": "alibi"},
        {"pos_emb": "rpe", "norm": "scalenorm"},
        {"pos_emb": "none", "activation": "gelu", "bias_gelu_fusion": True},
        {"pos_emb": "sinusoidal", "activation": "mish"},
        {"pos_emb": "none", "attention_config": [[["global", "local"], 1]]},
    ],
)
def test_options_that_transformers_does_not_have_are_proven(tmp_path, settings):
    assert other(tmp_path, ranks=2, **settings)["largest_differences"]["layer"] < 1e-5


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {"gpt_j_residual": True, "gpt_j_tied": True}),
        (2, {"norm": "non_parametric_layernorm"}),
        (1, {"use_qk_layernorm": True}),
        (1, {"use_qk_layernorm": True, "norm": "non_parametric_layernorm"}),
        (2, {"use_qk_layernorm": True, "norm": "rmsnorm"}),
    ],
    ids=str,
)
def test_other_norms_are_read(tmp_path, ranks, settings):
    result = other(tmp_path, ranks=ranks, pos_emb="none", **settings)
    assert result["largest_differences"]["layer"] < 1e-5
    written = yaml.safe_load((tmp_path / "ours" / "model.yml").read_text())
    assert {name: written.get(name.replace("_", "-")) for name in settings} == settings
    checkpoint = Checkpoint(tmp_path / "ours" / "global_step30")
    names = dict(
        build_sequential(checkpoint.model, checkpoint.resolved.run, checkpoint.vocab_size).named_parameters()
    )
    has_weights = settings.get("norm") != "non_parametric_layernorm"
    assert any("norm2" in name for name in names) == (has_weights and "gpt_j_tied" not in settings)
    assert any("qk_norm.both" in name for name in names) == (has_weights and "use_qk_layernorm" in settings)


@pytest.mark.parametrize(
    ("ranks", "settings", "message"),
    [
        (2, {"use_qk_layernorm": True}, "use-qk-layernorm, which each of 2 tensor-parallel ranks"),
        (1, {"qk_norm": "head"}, "qk-norm, which GPT-NeoX does not have"),
        (1, {"norm_placement": "after"}, "norm-placement or norm-zero-centered"),
        (1, {"norm_zero_centered": True}, "norm-placement or norm-zero-centered"),
    ],
)
def test_norms_of_other_programs_are_refused(tmp_path, ranks, settings, message):
    with pytest.raises(ConversionError, match=message):
        other(tmp_path, ranks=ranks, pos_emb="none", **settings)


def test_a_wrong_bias_of_positions_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(proof, "alibi_slopes", lambda heads: [0.3] * heads)
    with refused(ProofError, "the same model"):
        other(tmp_path, ranks=1, pos_emb="alibi")


@pytest.mark.parametrize("width", [64, 128])
def test_the_widths_of_earlier_versions_of_geglu_are_read(tmp_path, width):
    """Twice the hidden size in versions 1.0 and 2.0 of GPT-NeoX, and four times in 2021."""
    result = gated(tmp_path, width)
    assert result["largest_differences"]["layer"] < 1e-5
    assert Checkpoint(tmp_path / "ours" / "global_step30").shapes["layers.0.mlp.up.weight"] == (width, 32)


@pytest.mark.parametrize(("stated", "is_warned"), [(64, False), (96, True)])
def test_another_width_than_the_stored_one_is_logged(tmp_path, caplog, stated, is_warned):
    gated(tmp_path, 64, mlp_width=stated)
    text = "a feed-forward block of width 64, which counts; the configuration gives 96"
    assert (text in caplog.text) == is_warned


def gated(folder, width, **settings):
    """Convert a checkpoint of one rank with geglu."""
    source = gpt2()
    source.config |= {"activation": "geglu", **settings}
    generator = torch.Generator().manual_seed(5)
    for number in (2, 3):
        shapes = {
            "h_to_4h.weight": (2 * width, 32),
            "h_to_4h.bias": (2 * width,),
            "4h_to_h.weight": (32, width),
        }
        for name, shape in shapes.items():
            source.layers[number][f"mlp.dense_{name}"] = 0.1 * torch.randn(shape, generator=generator)
    return converted(folder, source, ranks=1)


def test_tokenizer_files_that_would_replace_each_other_are_refused(tmp_path):
    source = pythia()
    write_neox(tmp_path / "theirs", source)
    path = shutil.copy(tmp_path / "theirs" / "tokenizer.json", tmp_path / "model.yml")
    done = command(tmp_path, "--vocab-file", path)
    assert (done.exit_code, "two files are called model.yml; give " in done.output) == (2, True), done.output
    assert not (tmp_path / "ours").exists()


def test_an_embedding_that_was_padded_for_another_number_of_ranks_has_a_remedy(tmp_path):
    source = pythia()
    source.config["make_vocab_size_divisible_by"] = 32
    write_neox(tmp_path / "theirs", source, ranks=2)
    with refused(ConversionError, "to 320", "2 tensor-parallel", "288 rows", "make_vocab_size_divisible_by"):
        from_neox(tmp_path / "theirs", tmp_path / "ours")
    path = tmp_path / "changed.yml"
    path.write_text(yaml.safe_dump(source.config | {"make_vocab_size_divisible_by": 144}))
    from_neox(tmp_path / "theirs", tmp_path / "ours", config=[path])
    assert_same_logits(source, tmp_path / "ours" / "global_step30")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", range(1, 17))
def test_the_proof_adds_and_averages_to_the_last_bit(ranks, dtype):
    """A sum between two values of float32 is rounded the other way if it is 7, 11 or 13 times its mean."""
    parts = torch.randn(ranks, 20_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    copies = parts[:1] * (1 + torch.linspace(0, 0.01, ranks, dtype=torch.float64)).unsqueeze(1)
    for values in (parts, copies.to(dtype), parts[:1].expand(ranks, -1)):
        files = SimpleNamespace(
            folder="theirs", ranks=ranks, average_copies=True, differences={},
            dtype=lambda key: dtype, whole=lambda key, rank, values=values: values[rank],
        )  # fmt: skip
        added = proof._combined(files, "bias", is_added=True)
        assert torch.equal(added, tensors.SUM.values(files, "bias", None).double())
        mean = proof._combined(files, "bias")
        assert torch.equal(mean, stored_files.NeoXFiles.common(files, "bias").double())


def test_a_tokenizer_with_another_padding_is_refused(tmp_path):
    source = pythia()
    source.config["make_vocab_size_divisible_by"] = 128
    with refused(ConversionError, "280", "GPT-NeoX", "to 512", "has 288"):
        converted(tmp_path, source)


def test_only_files_that_were_read_are_hashed(tmp_path):
    write_neox(tmp_path / "theirs", pythia(), ranks=2)
    folder = tmp_path / "theirs" / "global_step30"
    (folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"optimizer")
    source = from_neox(tmp_path / "theirs", tmp_path / "ours")["source"]["sha256"]
    read = {path.name for path in folder.glob("*model_states.pt")} | {"configs/model.yml"}
    assert source.keys() == read | {str(tmp_path / "theirs" / "tokenizer.json")}
    assert source[RANK] == hashlib.sha256((folder / RANK).read_bytes()).hexdigest()


def test_a_killed_conversion_leaves_nothing(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(importing, "compare_blocks", stop)
    with pytest.raises(KeyboardInterrupt):
        converted(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]
