"""The command `neox-checkpoint`, on checkpoints of small runs and on damaged ones."""

import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from neox_config.facts.checkpoints import LATEST, MANIFEST
from neox_model.checkpoint.contents import Manifest, TensorRecord
from neox_model.checkpoint.shards import Part, write_shard
from neox_model.inspection.cli import main
from neox_model.verify import tensors as verified_tensors
from neox_model.versions import package_versions
from support.checkpoint_edits import edit_manifest, edit_tensors
from support.checkpoint_runs import Run
from support.refusals import shows

WEIGHT = "layers.0"
SHARD = "shard-00000.safetensors"


def command(*words: Any) -> Result:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def answer(*words: Any) -> dict[str, Any]:
    return json.loads(command(*words, "--json").stdout)


@pytest.fixture
def saved(tmp_path) -> Path:
    """Return a folder with checkpoints of iterations 1, 2 and 3."""
    run = Run()
    for _ in range(3):
        run.train()
        run.save(tmp_path / "save")
    return tmp_path / "save"


@pytest.fixture
def folder(saved) -> Path:
    return saved / "global_step3"


def rewritten(folder: Path, copy: Path) -> Path:
    """Write the same tensors as two ranks would: weights by blocks, states by ranges, in two shards."""
    manifest = Manifest.read(folder)
    values = load_file(folder / SHARD)
    shards: list[list[Part]] = [[], []]
    for name, record in manifest.tensors.items():
        flat = values[name].reshape(-1)
        whole = tuple((0, length) for length in record.shape)
        if name == WEIGHT:
            for rank, rows in enumerate(((0, 1), (1, 4))):
                block = (rows, (0, 3))
                held = values[name][slice(*rows)].reshape(-1)
                shards[rank].append(Part(name=name, shape=record.shape, block=block, start=0, values=held))
        else:
            middle = flat.numel() // 3
            for rank, (start, held) in enumerate(((0, flat[:middle]), (middle, flat[middle:]))):
                shards[rank].append(
                    Part(name=name, shape=record.shape, block=whole, start=start, values=held)
                )
    copy.mkdir(parents=True)
    pieces: dict[str, list[Any]] = {name: [] for name in manifest.tensors}
    files = {}
    for rank, parts in enumerate(shards):
        written, size = write_shard(copy / f"part-{rank}.safetensors", parts)
        files[f"part-{rank}.safetensors"] = size
        for each in written:
            pieces[each.name].append(each.piece)
    records = {
        name: TensorRecord(shape=record.shape, dtype=record.dtype, pieces=tuple(pieces[name]))
        for name, record in manifest.tensors.items()
    }
    (copy / MANIFEST).write_text(replace(manifest, tensors=records, files=files).to_json())
    return copy


def one_more_ulp(tensors: dict[str, torch.Tensor]) -> None:
    values = tensors[WEIGHT]
    values[1, 2] = torch.nextafter(values[1, 2], torch.tensor(torch.inf))


# inspect


def test_inspect_shows_the_latest_or_the_given_iteration(saved, folder):
    found = answer("inspect", saved, "--tensors")
    assert (found["folder"], found["iteration"], found["is_latest"]) == (str(folder), 3, True)
    assert (found["parameters"], found["weights"], found["dtypes"]) == (12, 1, {"F32": 1})
    assert found["model"] == {"layers": 1, "hidden size": 4, "activation": "gelu"}
    assert found["layout"] == {"data": 1, "model": 1, "pipe": 1, "zero_stage": None}
    assert found["optimizer"] == {"class": "AdamW", "states": ["exp_avg", "exp_avg_sq"], "numbers": ["step"]}
    assert (found["data"]["samples"], found["random_states"]) == (48, 1)
    assert found["schedule"]["applied_updates"] == 3
    assert found["packages"] == package_versions()
    assert found["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    (weight,) = (tensor for tensor in found["tensors"] if tensor["name"] == WEIGHT)
    assert weight == {
        "name": WEIGHT,
        "shape": [4, 3],
        "dtype": "F32",
        "bytes": 48,
        "files": [SHARD],
        "pieces": 1,
    }
    assert "tensors" not in answer("inspect", saved)
    for words in ((saved, 2), (saved / "global_step2",)):
        assert (answer("inspect", *words)["iteration"], answer("inspect", *words)["is_latest"]) == (2, False)
    text = command("inspect", saved, "--tensors").stdout
    # What only the training loop reads is in the JSON alone.
    (data,) = (line for line in text.splitlines() if line.startswith("  data "))
    shown = [entry.split()[0] for entry in data.removeprefix("  data ").split(", ")]
    position = ["samples_per_iteration", "samples", "validation_samples", "tokens", "skipped_iterations"]
    assert shown == [name for name in position if name in found["data"]]
    assert "batch_sizes" in found["data"]
    assert "any other layout" in text
    assert shows(text, "12", "1 weight", "F32 (1)")
    assert "layers.0/exp_avg_sq" in text


def test_inspect_neither_reads_shards_nor_loads_torch(saved, folder):
    (folder / SHARD).unlink()
    program = (
        "import sys\nfrom neox_model.inspection.cli import main\n"
        "main(['inspect', sys.argv[1]], standalone_mode=False)\n"
        "assert not {'torch', 'deepspeed'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program, str(saved)], check=True, stdout=subprocess.DEVNULL)


def test_comparing_loads_no_deepspeed(saved):
    program = (
        "import sys\nfrom neox_model.inspection.cli import main\n"
        "main(['diff', sys.argv[1], sys.argv[1]], standalone_mode=False)\n"
        "main(['verify', sys.argv[1]], standalone_mode=False)\n"
        "assert 'deepspeed' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(saved)], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["inspect", "{}/none"], "is not a folder; pass the folder given by `save`"),
        (["inspect", "{}/empty"], "contains no checkpoint; pass the folder given by `save`"),
        (["inspect", "{}/save", 7], "contains no checkpoint of iteration 7; choose one of 1, 2, 3"),
        (["verify", "{}/save/global_step2", 3], "is one checkpoint; leave out the iteration 3"),
        (["verify", "{}/save/global_step2", "--all"], "is one checkpoint; leave out --all"),
        (["verify", "{}/save", 2, "--all"], "--all verifies every iteration; leave out one of the two"),
        (["verify", "{}/empty", "--all"], "contains no checkpoint"),
        (["diff", "{}/save", "{}/none"], "is not a folder"),
    ],
)
def test_requests_for_no_checkpoint_are_refused(saved, tmp_path, words, sentence):
    (tmp_path / "empty").mkdir()
    result = command(*(str(word).format(tmp_path) for word in words))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert sentence in line


@pytest.mark.parametrize("words", [["inspect", "{}"], ["verify", "{}"], ["inspect", "{}/global_step10"]])
def test_a_checkpoint_of_gpt_neox_is_answered_with_the_command_that_converts_it(tmp_path, words):
    (tmp_path / "global_step10").mkdir()
    (tmp_path / "global_step10" / "mp_rank_00_model_states.pt").touch()
    (tmp_path / "latest").write_text("global_step10")
    result = command(*(word.format(tmp_path) for word in words))
    assert result.exit_code == 1
    assert f"neox-convert from-neox {tmp_path / 'global_step10'}" in result.stderr


# verify


def test_sound_checkpoints_are_sound(saved, folder):
    result = command("verify", saved)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{folder}: sound (8 tensors, ")
    result = command("verify", saved, "--all")
    assert result.exit_code == 0
    assert result.stdout.count(": sound (") == 3


def without_the_shard(folder: Path) -> None:
    (folder / SHARD).unlink()


def flipped(folder: Path) -> None:
    content = bytearray((folder / SHARD).read_bytes())
    content[-1] ^= 1
    (folder / SHARD).write_bytes(content)


def rewrite(folder: Path, change: Callable[[str], str]) -> None:
    """Replace the text of the manifest, which may be a link to that of another copy."""
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).write_text(change(text))


def with_an_incomplete_tensor(folder: Path) -> None:
    manifest = Manifest.read(folder)
    tensors = {**manifest.tensors, WEIGHT: replace(manifest.tensors[WEIGHT], shape=(5, 3))}
    rewrite(folder, lambda _: replace(manifest, tensors=tensors).to_json())


def with_values_that_are_not_finite(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{WEIGHT}/exp_avg"][0] = torch.tensor([torch.nan, -torch.inf, torch.nan])


NAN = {WEIGHT: {"step": {"value": math.nan, "dtype": "F32"}}}
DAMAGES = [
    (without_the_shard, f"cannot read {{folder}}/{SHARD}: No such file or directory"),
    (lambda folder: os.truncate(folder / SHARD, 1000), f"{SHARD} is damaged: it has 1,000 bytes instead of"),
    (flipped, f"{{folder}}/{SHARD} is damaged: the checksum of "),
    (
        lambda folder: edit_tensors(folder, with_values_that_are_not_finite),
        f"{WEIGHT}/exp_avg ({SHARD}) has 2 NaN and 1 infinite values",
    ),
    (lambda folder: edit_manifest(folder, "engine", {"cur_scale": math.inf}), "engine / cur_scale is inf"),
    (
        lambda folder: edit_manifest(folder, "optimizer_scalars", NAN),
        f"optimizer_scalars / {WEIGHT} / step is nan",
    ),
    (lambda folder: edit_manifest(folder, "schedule", {"curve": {}}), "schedule / curve / "),
    (
        lambda folder: edit_tensors(folder, lambda tensors: tensors.pop("rng/0/torch")),
        "rank 0: the state 'torch' of the random generators is missing or damaged",
    ),
    (
        lambda folder: edit_manifest(folder, "schedule", {}, without={"applied_updates"}),
        "schedule has no curve or no applied_updates",
    ),
    (
        lambda folder: edit_manifest(folder, "training", {}, without={"tokens"}),
        "does not record the number of tokens read",
    ),
    (with_an_incomplete_tensor, f"the pieces of {WEIGHT} are not the whole tensor"),
    (lambda folder: (folder / MANIFEST).unlink(), f"cannot read {{folder}}/{MANIFEST}: No such file or"),
    (lambda folder: rewrite(folder, lambda _: "[]"), "is damaged: it is not the text of a manifest; restore"),
    (
        lambda folder: rewrite(folder, lambda text: text.replace('"samples":48', '"samples":49')),
        "is damaged: its checksum does not match its contents",
    ),
]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGES)
def test_each_damage_is_named_once_with_what_to_do(saved, folder, damage, sentence):
    damage(folder)
    result = command("verify", saved, 3)
    assert result.exit_code == 1
    first, problem, remedy = result.stdout.splitlines()
    assert first == f"{folder}: NOT SOUND"
    assert sentence.format(folder=folder) in problem
    assert remedy.endswith(f"neox-checkpoint verify {saved} --all names the newest sound one")
    (shown,) = answer("verify", saved, 3)["checkpoints"]
    assert ([f"  {text}" for text in shown["problems"]], shown["is_sound"]) == ([problem], False)


def test_every_flipped_byte_is_found_or_changes_no_value(folder, tmp_path):
    expected = load_file(folder / SHARD)
    chosen, found = random.Random(5), 0
    for name in (SHARD, MANIFEST):
        content = (folder / name).read_bytes()
        places = chosen.sample(range(len(content)), 60)
        for place in places:
            changed = bytearray(content)
            changed[place] ^= 1 << chosen.randrange(8)
            (folder / name).write_bytes(changed)
            if command("verify", folder).exit_code == 1:
                found += 1
            else:
                values = load_file(folder / SHARD)
                assert all(torch.equal(values[key], expected[key]) for key in expected)
        (folder / name).write_bytes(content)
    assert found > 100


def test_verify_all_names_the_newest_sound_one_and_a_wrong_latest(saved, folder):
    flipped(folder)
    without_the_shard(saved / "global_step1")
    (saved / LATEST).write_text("global_step9\n")
    result = command("verify", saved, "--all")
    assert result.exit_code == 1
    verdicts = [line.partition(" (")[0] for line in result.stdout.splitlines() if line.startswith(str(saved))]
    assert verdicts[:3] == [
        f"{saved}/global_step1: NOT SOUND",
        f"{saved}/global_step2: sound",
        f"{folder}: NOT SOUND",
    ]
    assert "'global_step9', which is" in result.stdout
    assert result.stdout.splitlines()[-1].endswith(f"run: echo global_step2 > {saved / LATEST}")
    without_the_shard(saved / "global_step2")
    assert "no sound checkpoint" in command("verify", saved, "--all").stdout


def test_other_files_are_noted_and_do_no_harm(saved, folder):
    (folder / "notes\n.txt").write_text("ours")
    result = command("verify", saved)
    assert result.exit_code == 0
    assert "notes\\n.txt" in result.stdout


def test_the_newest_sound_one_is_offered_only_instead_of_the_latest(saved, folder, tmp_path):
    flipped(saved / "global_step2")
    restore = "restore the damaged files from a copy, if there is one"
    assert command("verify", saved, 2).stdout.splitlines()[-1] == restore
    assert command("verify", saved, "--all").stdout.splitlines()[-1] == restore
    flipped(folder)
    shutil.copytree(folder, tmp_path / "copy")
    assert command("verify", tmp_path / "copy").stdout.splitlines()[-1] == restore
    (saved / LATEST).unlink()
    assert command("verify", folder).stdout.endswith(f"verify {saved} --all names the newest sound one\n")


def test_a_wrong_latest_gives_one_advice(saved, folder):
    (saved / LATEST).write_text("global_step9\n")
    *_, latest, remedy = command("verify", saved, "--all").stdout.splitlines()
    assert shows(latest, f"{saved / LATEST} names", "'global_step9'")
    assert shows(remedy, "global_step3", saved / LATEST)


def test_a_checkpoint_is_named_by_the_working_directory(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert command("verify", ".", 3).exit_code == 0


def test_a_tensor_name_of_many_digits_is_shown(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"layers." + "1" * 5000: torch.ones(2)}))
    assert command("inspect", folder, "--tensors").exit_code == 0


# diff


def test_the_same_state_written_by_another_layout_is_equal(folder, tmp_path, monkeypatch):
    copy = rewritten(folder, tmp_path / "copy")
    assert command("verify", copy).exit_code == 0
    monkeypatch.setattr(verified_tensors, "_CHUNK", 5)
    result = command("diff", folder, copy)
    assert result.exit_code == 0, result.stdout
    assert result.stdout.splitlines()[2] == "equal:"
    found = answer("diff", folder, copy)
    assert found["is_equal"]
    assert {tensor["differing"] for tensor in found["tensors"]} == {0}
    edit_tensors(folder, one_more_ulp)
    (tensor,) = (each for each in answer("diff", folder, copy)["tensors"] if each["differing"])
    assert (tensor["name"], tensor["differing"], tensor["ulps"]) == (WEIGHT, 1, 1.0)


def test_one_ulp_is_found_and_measured(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    before = load_file(folder / SHARD)[WEIGHT].double()
    edit_tensors(tmp_path / "copy", one_more_ulp)
    after = load_file(tmp_path / "copy" / SHARD)[WEIGHT].double()
    result = command("diff", folder, tmp_path / "copy")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    norm = float((after - before).norm()) / max(float(before.norm()), float(after.norm()))
    measure = f"by at most 1 ulp, relative norm {norm:.2e}"
    assert shows(lines[-1], f"{WEIGHT}: 1", "12 elements", measure)
    assert shows(lines[3], "1", "1 tensors")
    assert "equal (2 tensors)" in lines[4]
    every = command("diff", folder, tmp_path / "copy", "--all").stdout.splitlines()
    assert f"  {WEIGHT}/exp_avg: equal" in every
    assert len(every) == len(lines) + 7


def test_counters_settings_and_missing_tensors_are_named(saved, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    copy = tmp_path / "copy"
    edit_tensors(copy, lambda tensors: tensors.pop(f"{WEIGHT}/exp_avg_sq"))
    edit_tensors(copy, lambda tensors: tensors.update(extra=torch.ones(2)))
    edit_manifest(copy, "config", {"save": "elsewhere", "zero_optimization": {"stage": 1}})
    edit_manifest(copy, "packages", {"torch": "0.1"})
    found = answer("diff", folder, copy)
    assert {each["name"]: each["reason"] for each in found["tensors"] if each["reason"]} == {
        f"{WEIGHT}/exp_avg_sq": "only in A",
        "extra": "only in B",
    }
    assert found["free"] == {"save": [None, "elsewhere"], "zero_optimization.stage": [None, 1]}
    assert found["packages"]["torch"][1] == "0.1"
    assert (found["counters"], found["model"], found["training"]) == ({}, {}, {})
    found = answer("diff", saved / "global_step2", folder)
    assert found["counters"] == {
        "iteration": [2, 3],
        "training.iteration": [2, 3],
        "training.samples": [32, 48],
        "engine.steps": [2, 3],
        "schedule.applied_updates": [2, 3],
        "optimizer state step (weights: 1)": [2.0, 3.0],
    }


def test_changed_parameters_of_model_and_training_count_and_others_do_not(folder, tmp_path):
    effects = Manifest.read(folder).config["in_effect"]
    for name, config, equal in (
        ("free", {"save": "elsewhere"}, True),
        ("model", {"in_effect": {**effects, "model": {**effects["model"], "activation": "relu"}}}, False),
        ("training", {"in_effect": {**effects, "training": {"train_batch_size": 8}}}, False),
    ):
        shutil.copytree(folder, tmp_path / name)
        edit_manifest(tmp_path / name, "config", config)
        result = command("diff", folder, tmp_path / name)
        assert (result.exit_code == 0) == equal, name
    assert answer("diff", folder, tmp_path / "model")["model"] == {"activation": ["gelu", "relu"]}
    assert answer("diff", folder, tmp_path / "training")["training"]["train_batch_size"] == [16, 8]


def test_a_damaged_checkpoint_is_not_compared(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    flipped(tmp_path / "copy")
    result = command("diff", folder, tmp_path / "copy")
    assert result.exit_code == 1
    assert "the checksum" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("value", [5, None, {"model": 5}])
def test_parameters_of_another_form_are_refused_with_their_file(folder, tmp_path, value):
    shutil.copytree(folder, tmp_path / "copy")
    edit_manifest(tmp_path / "copy", "config", {"in_effect": value})
    for pair in ((folder, tmp_path / "copy"), (tmp_path / "copy", folder)):
        result = command("diff", *pair)
        assert result.exit_code == 1
        assert shows(result.stderr, f"{tmp_path}/copy/{MANIFEST}", "in_effect")


def test_parameters_are_compared_as_far_as_one_records_its_values_in_effect(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "old")
    edit_manifest(tmp_path / "old", "config", {}, without={"in_effect"})
    shutil.copytree(tmp_path / "old", tmp_path / "older")
    found, reverse = answer("diff", folder, tmp_path / "old"), answer("diff", tmp_path / "old", folder)
    for part in ("model", "training"):
        assert {name: pair[::-1] for name, pair in reverse[part].items()} == found[part]
    assert (found["not_compared"], found["is_equal"]) == (reverse["not_compared"], reverse["is_equal"])
    result = command("diff", tmp_path / "old", tmp_path / "older")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert lines[2].startswith("equal, ")
    for part in ("model", "training"):
        assert any(line.startswith(f"  {part:18}not compared") for line in lines)


def test_missing_counters_and_numbers_are_differences(folder, tmp_path):
    for name, part, lost in (
        ("a", "training", "samples"),
        ("b", "schedule", "applied_updates"),
        ("c", "optimizer_scalars", WEIGHT),
    ):
        shutil.copytree(folder, tmp_path / name)
        edit_manifest(tmp_path / name, part, {}, without={lost})
    found = [answer("diff", folder, tmp_path / name)["counters"] for name in "abc"]
    assert found == [
        {"training.samples": [48, None]},
        {"schedule.applied_updates": [3, None]},
        {"optimizer state step (weights: 1)": [3.0, None]},
    ]


def test_long_values_are_shown_from_their_first_difference(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    sizes = [[number, 16] for number in range(40)]
    edit_manifest(folder, "training", {"batch_sizes": sizes})
    edit_manifest(tmp_path / "copy", "training", {"batch_sizes": [*sizes[:-1], [39, 17]]})
    shown = [line for line in command("diff", folder, tmp_path / "copy").stdout.splitlines() if "..." in line]
    assert len(shown) == 1
    assert shown[0].endswith(": ... 16], [39, 16]] in A, ... 16], [39, 17]] in B")


def test_curves_are_compared_value_by_value(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    curve = Manifest.read(folder).schedule["curve"]
    name = sorted(curve)[0]
    edit_manifest(tmp_path / "copy", "schedule", {"curve": {**curve, name: 0.125}})
    assert answer("diff", folder, tmp_path / "copy")["counters"] == {
        f"schedule.curve.{name}": [curve[name], 0.125]
    }


def test_a_stored_dtype_is_a_difference(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    edit_tensors(tmp_path / "copy", lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].double()}))
    result = command("diff", folder, tmp_path / "copy")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].endswith("stored as F32 in A, F64 in B")


def test_another_order_of_the_same_samples_is_a_difference(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    edit_manifest(folder, "config", {"samples_digest": {"train": 1, "valid": 2}})
    edit_manifest(tmp_path / "copy", "config", {"samples_digest": {"train": 3}})
    assert answer("diff", folder, tmp_path / "copy")["counters"] == {"data order of train": [1, 3]}


def test_nan_in_both_is_no_difference(folder, tmp_path):
    edit_manifest(folder, "engine", {"cur_scale": math.nan})
    shutil.copytree(folder, tmp_path / "copy")
    assert command("diff", folder, tmp_path / "copy").exit_code == 0


def test_random_states_come_last(folder, tmp_path):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        one_more_ulp(tensors)
        tensors["rng/0/numpy"][0] += 10**9

    shutil.copytree(folder, tmp_path / "copy")
    edit_tensors(tmp_path / "copy", change)
    lines = command("diff", folder, tmp_path / "copy").stdout.splitlines()
    assert [line.split(":")[0].strip() for line in lines[-2:]] == [WEIGHT, "rng/0/numpy"]


# convert-layout


def test_a_checkpoint_of_several_ranks_is_written_with_whole_tensors(folder, tmp_path, monkeypatch):
    from neox_model.checkpoint import convert_layout

    monkeypatch.setattr(convert_layout, "_ELEMENTS", 5)
    ranks = rewritten(folder, tmp_path / "ranks" / "global_step3")
    result = command("convert-layout", ranks, "--output", tmp_path / "whole")
    whole = tmp_path / "whole" / "global_step3"
    assert result.exit_code == 0
    assert result.stdout == f"wrote {whole}: {ranks} with whole tensors\n"
    assert sorted(path.name for path in whole.iterdir()) == [MANIFEST, SHARD]
    assert {name: values.tolist() for name, values in load_file(whole / SHARD).items()} == {
        name: values.tolist() for name, values in load_file(folder / SHARD).items()
    }
    before, after = Manifest.read(ranks), Manifest.read(whole)
    assert replace(after, tensors=before.tensors, files=before.files) == before
    assert all(len(record.pieces) == 1 for record in after.tensors.values())
    assert command("verify", tmp_path / "whole").exit_code == 0
    assert command("diff", ranks, whole).exit_code == 0


def test_a_training_continues_from_a_converted_checkpoint_to_the_last_bit(folder, tmp_path):
    ranks = rewritten(folder, tmp_path / "ranks" / "global_step3")
    command("convert-layout", ranks, "--output", tmp_path / "whole")
    expected, resumed = Run(), Run()
    for run, source in ((expected, folder.parent), (resumed, tmp_path / "whole")):
        run.load(source)  # With the random states, from which gradients are drawn.
        run.train()
    assert (resumed.weights, resumed.states) == (expected.weights, expected.states)


def test_a_damaged_checkpoint_or_one_that_is_there_is_not_converted(folder, tmp_path):
    ranks = rewritten(folder, tmp_path / "ranks" / "global_step3")
    shard = ranks / "part-1.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    result = command("convert-layout", ranks, "--output", tmp_path / "whole")
    assert result.exit_code == 1
    assert "part-1.safetensors is damaged" in result.stderr
    assert list((tmp_path / "whole").iterdir()) == []
    result = command("convert-layout", folder, "--output", folder.parent)
    assert result.exit_code == 1
    assert f"{folder} exists already" in result.stderr


def test_the_import_of_torch_is_announced_where_it_is_used(folder, caplog):
    command("inspect", folder)
    assert "importing torch" not in caplog.messages
    command("verify", folder)
    assert "importing torch" in caplog.messages
