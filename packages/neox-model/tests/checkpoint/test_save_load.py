"""What is restored, what is left out and what is refused, on one process without DeepSpeed."""

import errno
import importlib.metadata
import json
import logging
import math
import platform
import random
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from neox_config.facts.checkpoints import MANIFEST
from neox_config.facts.deepspeed_schedules import WarmupLR
from neox_config.spec.resume import Changes
from neox_model.checkpoint import comparison, save
from neox_model.checkpoint.contents import FORMAT, Manifest
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.load import load_weights, read_training_state
from neox_model.errors import ModelError
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.parallel.topology import create_groups
from neox_model.versions import package_versions
from support.checkpoint_edits import edit_manifest
from support.checkpoint_runs import COUNTS, CURVE, CYCLE, STATE, Run
from support.distributed import run_ranks
from support.refusals import refused, shows


@pytest.fixture
def trained() -> Run:
    run = Run()
    run.train()
    run.train()
    return run


def test_everything_comes_back(tmp_path, trained):
    trained.save(tmp_path)
    run = Run()
    run.load(tmp_path)
    assert run.iteration == run.engine.steps == 2
    assert (run.weights, run.states) == (trained.weights, trained.states)
    assert run.state.state == trained.state.state
    assert run.schedule.state == {"applied_updates": 2}


@pytest.mark.parametrize("source", ["agreement", "checkpoint"])
def test_a_schedule_without_a_class_is_that_of_earlier_versions(tmp_path, trained, source):
    edit_manifest(trained.save(tmp_path), "schedule", {}, without={"class"})
    run = Run()
    run.load(tmp_path, schedule_source=source)
    assert run.schedule.curve == CURVE


def test_an_empty_folder_means_from_scratch_for_training_and_is_an_error_for_generation(tmp_path):
    run = Run()
    run.load(tmp_path / "none")
    assert run.iteration is None
    with refused(CheckpointError, code="no-checkpoint"):
        load_weights(tmp_path / "none", model=run.model, groups=SINGLE_PROCESS, config={})


def without_packages(folder: Path) -> None:
    """Rewrite a manifest as earlier versions wrote it."""
    contents = json.loads((folder / MANIFEST).read_text())["contents"]
    del contents["packages"]
    text = json.dumps(contents, separators=(",", ":"), sort_keys=True)
    document = f'{{"format": "{FORMAT}", "crc32": {zlib.crc32(text.encode())}, "contents": {text}}}'
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).write_text(document)


def test_other_versions_than_the_checkpoints_are_named_in_one_line(tmp_path, trained, caplog):
    folder = trained.save(tmp_path)
    recorded = Manifest.read(folder).packages
    assert recorded == package_versions()
    assert recorded["python"] == platform.python_version()
    assert recorded["torch"] == importlib.metadata.version("torch")
    assert {"deepspeed", "numpy", "neox-model", "neox-launcher"} < recorded.keys()
    Run().load(tmp_path)
    assert not [message for message in caplog.messages if "versions" in message]
    edit_manifest(folder, "packages", {"torch": "2.9.1", "cuda": "12.8"}, without={"numpy"})
    Run().load(tmp_path)
    (message,) = (message for message in caplog.messages if "versions" in message)
    there = {**recorded, "numpy": "none", "torch": "2.9.1", "cuda": "12.8"}
    here = {"cuda": "none", **recorded}
    assert message == "the checkpoint was written with other versions: " + "; ".join(
        f"{name} {there[name]} in the checkpoint, {here[name]} in this run"
        for name in ("cuda", "numpy", "torch")
        if there[name] != here[name]
    )


def test_a_checkpoint_without_versions_loads_silently(tmp_path, trained, caplog):
    folder = trained.save(tmp_path)
    without_packages(folder)
    assert Manifest.read(folder).packages == {}
    run = Run()
    run.load(tmp_path)
    assert (run.iteration, run.weights) == (2, trained.weights)
    assert not [message for message in caplog.messages if "versions" in message]


def test_finetune_takes_the_weights_alone(tmp_path, trained):
    trained.save(tmp_path)
    run = Run()
    before = torch.get_rng_state()
    run.load(tmp_path, finetune=True)
    assert run.iteration == run.engine.steps == 0
    assert run.weights == trained.weights
    assert not run.engine.update.optimizer.state
    assert (run.state.state, run.schedule.state) == (STATE, {"applied_updates": 0})
    assert torch.equal(torch.get_rng_state(), before)


def test_optimizer_states_can_be_left_out_when_loading_or_saving(tmp_path, trained):
    trained.save(tmp_path / "whole")
    smaller = trained.save(tmp_path / "weights", save_optimizer=False)
    assert list(Manifest.read(smaller).weight_names) == ["layers.0"]
    for directory in ("whole", "weights"):
        run = Run()
        run.load(tmp_path / directory, load_optimizer=False)
        assert run.weights == trained.weights
        assert not run.engine.update.optimizer.state
        assert run.schedule.state == {"applied_updates": 2}
    remedy = "to continue with new ones, set finetune: false, no-load-optim: true; to start at iteration 0"
    with refused(CheckpointError, remedy, code="no-optimizer-states"):
        Run().load(tmp_path / "weights")
    # As a checkpoint that was converted from GPT-NeoX.
    trained.save(tmp_path / "bare", save_optimizer=False, save_rng=False)
    every = "no-load-optim: true, no-load-rng: true, override-lr-scheduler: true; to start"
    with refused(CheckpointError, every, code="no-optimizer-states"):
        Run().load(tmp_path / "bare")


def _draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), torch.rand(1).item()]


def test_random_generators_go_on_where_they_were(tmp_path, trained):
    random.gauss(0, 1), np.random.normal()
    trained.save(tmp_path)
    expected = _draw() + _draw()
    Run().load(tmp_path)
    assert _draw() + _draw() == expected


def test_random_generators_are_unchanged_or_reseeded(tmp_path, trained, caplog):
    trained.save(tmp_path, save_rng=False)
    before = torch.get_rng_state()
    run = Run()
    torch.set_rng_state(before)
    run.load(tmp_path, load_rng=False)
    assert torch.equal(torch.get_rng_state(), before)
    with caplog.at_level(logging.WARNING):
        run.load(tmp_path)
    first = _draw()
    Run().load(tmp_path)
    assert _draw() == first
    warnings = {record.getMessage() for record in caplog.records}
    assert warnings == {
        "random generator states are not restored but seeded again: "
        "the checkpoint contains none (no-save-rng)"
    }


def test_learning_rate_curves_must_agree_or_one_must_be_chosen(tmp_path, trained):
    trained.save(tmp_path)
    run = Run()
    run.schedule.curve = other = replace(CURVE, peak=0.2)
    with refused(CheckpointError, "0.1", "0.2", "override-lr-scheduler"):
        run.load(tmp_path)
    run.load(tmp_path, schedule_source="config")
    assert (run.schedule.curve, run.schedule.state) == (other, {"applied_updates": 2})
    run.load(tmp_path, schedule_source="checkpoint")
    assert (run.schedule.curve, run.schedule.state) == (CURVE, {"applied_updates": 2})


WARMUP = WarmupLR(warmup_min_lr=0.0, warmup_max_lr=0.1, warmup_num_steps=9, warmup_type="log")


def test_the_class_of_the_curve_is_stored_and_compared(tmp_path, trained):
    trained.schedule.curve = WARMUP
    stored = Manifest.read(trained.save(tmp_path)).schedule
    assert (stored["class"], stored["curve"]) == ("WarmupLR", asdict(WARMUP))
    run = Run()
    with refused(CheckpointError, "WarmupLR", "WarmupThenDecay", "override-lr-scheduler"):
        run.load(tmp_path)
    run.load(tmp_path, schedule_source="config")
    assert run.schedule.curve == CURVE
    run.load(tmp_path, schedule_source="checkpoint")
    assert run.schedule.curve == WARMUP
    run.schedule.curve = replace(WARMUP, warmup_num_steps=7)
    with refused(CheckpointError, "warmup_num_steps", "9", "7"):
        run.load(tmp_path)


def test_a_checkpoint_whose_curve_changes_a_momentum_that_the_optimizer_lacks_is_refused(tmp_path, trained):
    trained.schedule.curve = CYCLE
    trained.save(tmp_path)
    run = Run()
    before = run.weights
    with refused(CheckpointError, "OneCycle"):
        run.load(tmp_path, schedule_source="checkpoint")
    assert run.weights == before
    run.load(tmp_path, schedule_source="config")
    assert run.schedule.curve == CURVE


@pytest.mark.parametrize(
    ("sizes", "values"),
    [
        ({"width": 5}, ["layers.0", "(4, 3)", "(5, 3)", "hidden-size: 4", "5"]),
        ({"layers": 2}, ["layers.1", "num-layers: 1", "2"]),
    ],
)
def test_another_model_is_refused_with_the_parameters_that_differ(tmp_path, trained, sizes, values):
    trained.save(tmp_path)
    with refused(CheckpointError, *values[-2:], "finetune: true", code="different-model"):
        Run(**sizes).load(tmp_path)
    with refused(CheckpointError, *values):
        Run(**sizes).load(tmp_path, finetune=True)
    run = Run(**sizes)
    with refused(CheckpointError, *values[-2:]):
        load_weights(tmp_path, model=run.model, groups=SINGLE_PROCESS, config=run.config)


def changed(run: Run, kind: str, **values: Any) -> Run:
    """Return the run with other values in effect; a double underscore in a name is a dot."""
    named = {name.replace("__", "."): value for name, value in values.items()}
    in_effect = run.config["in_effect"]
    run.config = run.config | {"in_effect": in_effect | {kind: in_effect[kind] | named}}
    return run


def test_different_function_of_the_same_weights_requires_finetune(tmp_path, trained, caplog):
    trained.save(tmp_path)
    run = changed(Run(), "model", activation="relu")
    before = run.weights
    with refused(CheckpointError, "activation", "gelu", "relu", "finetune: true", code="different-model"):
        run.load(tmp_path)
    with refused(CheckpointError, "activation", "gelu", "relu", code="different-model"):
        load_weights(tmp_path, model=run.model, groups=SINGLE_PROCESS, config=run.config)
    assert run.weights == before
    with caplog.at_level(logging.WARNING):
        run.load(tmp_path, finetune=True)
    assert run.weights == trained.weights
    assert shows(caplog.messages, "finetune", "activation", "gelu", "relu")


def test_another_training_is_one_table_in_the_log(tmp_path, trained, caplog):
    trained.save(tmp_path)
    run = changed(Run(), "training", train_batch_size=32, warmup=0.5)
    with caplog.at_level(logging.WARNING):
        run.load(tmp_path, finetune=True)
        assert caplog.messages == []
        run.load(tmp_path)
    # An older version without `warmup` had its default.
    assert shows(caplog.messages, "train-batch-size", "16", "32", "0.01", "0.5")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        run.load(tmp_path, schedule_source="checkpoint")
    assert "warmup" not in caplog.text


def test_incompatible_optimizer_states_are_refused(tmp_path, trained):
    trained.save(tmp_path)
    run = changed(Run(), "training", optimizer__params__adam_w_mode=False)
    with refused(CheckpointError, "params.adam-w-mode", "no-load-optim"):
        run.load(tmp_path)
    run.load(tmp_path, load_optimizer=False)
    assert run.weights == trained.weights
    assert not run.engine.update.optimizer.state


@pytest.mark.parametrize("use", ["resume", "finetune", "weights alone"])
def test_settings_of_an_unknown_version_are_reported(tmp_path, trained, caplog, use):
    trained.config = {"num_layers": "a"}
    trained.save(tmp_path)
    run = Run()
    with caplog.at_level(logging.WARNING):
        if use == "weights alone":
            load_weights(tmp_path, model=run.model, groups=SINGLE_PROCESS, config=run.config)
        else:
            run.load(tmp_path, finetune=use == "finetune")
    (message,) = caplog.messages
    assert message.startswith(
        "the checkpoint was written by another version, so its settings are not compared"
    )


def test_configurations_are_compared_once(tmp_path, trained, monkeypatch):
    trained.save(tmp_path)
    compared = []
    monkeypatch.setattr(comparison, "compare", lambda *both, **more: compared.append(both) or Changes())
    Run().load(tmp_path)
    assert len(compared) == 1


def test_an_error_of_the_engine_is_reported_without_its_class_name(tmp_path, trained, monkeypatch):
    def held() -> None:
        raise ModelError("offloaded to nvme")

    monkeypatch.setattr(trained.engine.update, "param_shards", held)
    with refused(CheckpointError, "offloaded to nvme"):
        trained.save(tmp_path)
    assert list(tmp_path.glob("global_step*")) == []


def test_number_of_samples_is_computed_for_an_older_checkpoint(tmp_path, trained):
    trained.config |= {"samples_per_iteration": 16, "eval_interval": 2, "eval_iters": 3}
    trained.state.state = {"iteration": 2, **COUNTS}
    trained.save(tmp_path)
    expected = {"iteration": 2, "samples": 32, "validation_samples": 48, "batch_sizes": [[0, 16]], **COUNTS}
    assert read_training_state(tmp_path, groups=SINGLE_PROCESS) == expected
    run = Run()
    run.load(tmp_path)
    assert run.state.state == expected
    assert read_training_state(tmp_path / "none", groups=SINGLE_PROCESS) is None


def test_batch_sizes_that_do_not_account_for_the_samples_are_unknown(tmp_path, trained):
    trained.config |= {"samples_per_iteration": 16}
    trained.state.state = {"iteration": 2, "samples": 20, "validation_samples": 0, **COUNTS}
    trained.save(tmp_path)
    assert read_training_state(tmp_path, groups=SINGLE_PROCESS)["batch_sizes"] == []


@pytest.mark.parametrize("recorded", [{"iteration": 2}, {}, {"iteration": 2, "validation_samples": 0}])
def test_checkpoint_with_an_unknown_number_of_samples_is_refused(tmp_path, trained, recorded):
    trained.state.state = recorded
    trained.save(tmp_path)
    with refused(CheckpointError, "number of samples", "finetune"):
        Run().load(tmp_path)


@pytest.mark.parametrize(
    ("missing", "what"), [("tokens", "tokens read"), ("skipped_iterations", "skipped updates")]
)
def test_a_checkpoint_without_a_count_is_refused(tmp_path, trained, missing, what):
    trained.state.state = {"iteration": 2, "samples": 20, "validation_samples": 0, **COUNTS}
    del trained.state.state[missing]
    trained.save(tmp_path)
    with refused(CheckpointError, what):
        Run().load(tmp_path)
    assert read_training_state(tmp_path, groups=SINGLE_PROCESS)["samples"] == 20


def test_a_smaller_model_does_not_silently_leave_layers_out(tmp_path):
    run = Run(layers=2)
    run.train()
    run.save(tmp_path)
    with refused(CheckpointError, "layers.1", code="different-model"):
        Run().load(tmp_path, finetune=True)


def test_another_optimizer_is_refused_unless_its_states_mean_the_same(tmp_path, trained):
    trained.save(tmp_path)
    with refused(CheckpointError, "AdamW", "SGD"):
        Run(optimizer=torch.optim.SGD).load(tmp_path)
    run = Run(optimizer=torch.optim.Adam)
    run.load(tmp_path)
    assert run.states == trained.states


def test_states_of_another_shape_than_their_weight_are_saved_whole(tmp_path):
    run = Run(optimizer=torch.optim.Adafactor)
    run.train()
    states = {name: record.shape for name, record in Manifest.read(run.save(tmp_path)).tensors.items()}
    assert (states["layers.0/row_var"], states["layers.0/col_var"]) == ((4, 1), (1, 3))
    other = Run(optimizer=torch.optim.Adafactor)
    other.load(tmp_path)
    assert other.states == run.states
    assert "row_var" in str(run.states)


def test_states_that_are_no_tensors_and_no_numbers_are_refused(tmp_path):
    run = Run(optimizer=torch.optim.SGD)
    run.train()
    run.engine.update.optimizer.state[run.model.layers[0]] = {"history": [1, 2]}
    with refused(CheckpointError, "'history'", "layers.0", "SGD", "no-save"):
        run.save(tmp_path)
    run.save(tmp_path, save_optimizer=False)


def _damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def test_damage_anywhere_is_found_and_the_one_before_is_offered(tmp_path, trained):
    trained.save(tmp_path)
    trained.train()
    newest = trained.save(tmp_path)
    remedy = (
        f"to resume from the complete checkpoint global_step2, run: echo global_step2 > {tmp_path / 'latest'}"
    )
    for path in sorted(newest.iterdir()):
        whole = path.read_bytes()
        for damage in (_damage, _truncate, Path.unlink):
            damage(path)
            with pytest.raises(CheckpointError) as raised:
                Run().load(tmp_path)
            assert str(path) in str(raised.value) or path.name == MANIFEST
            if path.name != MANIFEST or path.exists():
                assert remedy in str(raised.value)
            path.write_bytes(whole)
    Run().load(tmp_path)


def test_any_single_byte_of_the_manifest_matters(tmp_path, trained):
    path = trained.save(tmp_path) / MANIFEST
    text = path.read_bytes()
    for place in random.Random(1).sample(range(len(text) - 1), 60):
        path.write_bytes(text[:place] + bytes([text[place] ^ 4]) + text[place + 1 :])
        with pytest.raises(CheckpointError):
            Run().load(tmp_path)


def test_unknown_format_is_reported(tmp_path, trained):
    path = trained.save(tmp_path) / MANIFEST
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"format": "neox-checkpoint-9"}))
    with refused(CheckpointError, "'neox-checkpoint-9'"):
        Run().load(tmp_path)


def test_a_full_disk_leaves_the_last_checkpoint_and_nothing_half(tmp_path, trained, monkeypatch):
    trained.save(tmp_path)
    trained.train()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with refused(CheckpointError, "global_step3"):
            trained.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step2", "latest"]
    trained.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step2", "global_step3", "latest"]


def test_older_checkpoints_are_deleted(tmp_path):
    run = Run()
    for _ in range(4):
        run.train()
        run.save(tmp_path, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step3", "global_step4", "latest"]


def load_another_model(directory: str) -> str:
    """Load the checkpoint of another model."""
    groups = create_groups(1, 1)
    Run(groups=groups).save(Path(directory))
    try:
        Run(groups=groups, width=5).load(Path(directory))
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_failure_on_all_ranks_names_none(tmp_path):
    first, second = run_ranks(load_another_model, size=2, directory=str(tmp_path))
    assert first == second
    assert "global_step0 failed" in first


def fail_on_one_rank(directory: str) -> tuple[list[str], list[bool]]:
    """Save, then load, with a failure on rank 1 only."""
    torch.manual_seed(1)
    run = Run(groups=create_groups(1, 1))
    run.train()
    run.save(Path(directory))
    run.train()
    messages, heard = [], []
    write = save.write_shard
    if dist.get_rank() == 1:

        def full(path: Path, parts: Any) -> Any:
            write(path, parts)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

        save.write_shard = full
    for action in (run.save, run.load):
        if action == run.load and dist.get_rank() == 1:
            (Path(directory) / "global_step1" / "shard-00001.safetensors").unlink()
        dist.barrier()
        try:
            action(Path(directory))
        except CheckpointError as error:
            messages.append(str(error))
            heard.append(error.is_of_another_rank)
    return messages, heard


def test_a_failure_on_one_rank_is_the_same_error_on_all(tmp_path):
    first, second = run_ranks(fail_on_one_rank, size=2, directory=str(tmp_path))
    assert first[0] == second[0]
    assert (first[1], second[1]) == ([True, True], [False, False])
    saving, loading = first[0]
    assert "on rank 1" in saving
    assert "No space left" in saving
    assert "shard-00001.safetensors" in loading
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "latest"]


def test_changed_order_of_samples_is_logged_on_resume(tmp_path, trained, caplog):
    trained.config = trained.config | {"samples_digest": {"train": "a", "valid": "c"}}
    trained.save(tmp_path)
    run = Run()
    with caplog.at_level(logging.WARNING):
        for digests in ({"train": "b", "valid": "c"}, {"train": "a", "valid": "c"}, {"train": "a"}):
            run.config = run.config | {"samples_digest": digests}
            run.load(tmp_path)
        run.config = run.config | {"samples_digest": {"train": "a", "valid": "d"}}
        run.load(tmp_path)
    assert shows(caplog.messages, "different order", "read twice")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        run.load(tmp_path)
    (record,) = [each for each in caplog.records if each.message.startswith("validation samples differ")]
    assert record.levelname == "INFO"


def test_other_data_is_named_on_resume_with_its_documents(tmp_path, trained, caplog):
    trained.config = trained.config | {"samples_digest": {"train": "a"}, "documents": 1000}
    trained.save(tmp_path)
    run = Run()
    with caplog.at_level(logging.WARNING):
        for documents in (2000, 1000, None):
            run.config = run.config | {"samples_digest": {"train": "b"}, "documents": documents}
            run.load(tmp_path)
    end = "some will be read twice, others not at all"
    same = f"training samples are in a different order than before the checkpoint: {end}"
    assert caplog.messages == [
        f"training samples are of other documents than before the checkpoint (1,000 then, 2,000 now): {end}",
        same,
        same,
    ]


def two_layers() -> Run:
    run = Run(layers=2)
    run.train()
    return run


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["weight", "state"])
def test_a_value_that_is_not_finite_is_not_saved_and_nothing_earlier_is_deleted(tmp_path, value, place):
    run = two_layers()
    run.save(tmp_path, keep_last=1)
    run.train()
    second = run.model.layers[1]
    broken = second.data if place == "weight" else run.engine.update.optimizer.state[second]["exp_avg"]
    broken[2, 1] = value
    name = "layers.1" if place == "weight" else "layers.1/exp_avg"
    with refused(CheckpointError, name, code="not-finite"):
        run.save(tmp_path, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "latest"]
    Run(layers=2).load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_found_anywhere(dtype, value):
    def parts(values: torch.Tensor) -> list[save.Part]:
        shape, block = tuple(values.shape), ((0, values.numel()),)
        return [save.Part(name="layers.0", shape=shape, block=block, start=0, values=values)]

    largest = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    save._check_finite(parts(largest) + parts(torch.empty(0)) + parts(torch.ones(3, dtype=torch.int64)))
    for place in (0, 777, 999):
        broken = largest.clone()
        broken[place] = value
        with refused(CheckpointError, "layers.0", code="not-finite"):
            save._check_finite(parts(broken))


def test_states_that_are_not_saved_are_not_judged(tmp_path):
    run = two_layers()
    run.engine.update.optimizer.state[run.model.layers[0]]["exp_avg"][0, 0] = math.nan
    run.save(tmp_path, save_optimizer=False)


def test_weights_that_are_not_finite_are_not_loaded_and_the_one_before_is_offered(tmp_path, monkeypatch):
    run = two_layers()
    run.save(tmp_path)
    run.train()
    run.model.layers[0].data[0, 0] = math.nan
    # As a version that does not look would write it.
    monkeypatch.setattr(save, "_check_finite", lambda parts: None)
    run.save(tmp_path)
    with refused(CheckpointError, "layers.0", "global_step1"):
        Run(layers=2).load(tmp_path)


def test_all_that_is_not_finite_is_counted(tmp_path):
    run = two_layers()
    for parameter in run.model.parameters():
        parameter.data.fill_(math.nan)
    with refused(CheckpointError, "layers.0", "1 more", code="not-finite"):
        run.save(tmp_path)
    assert torch.isnan(run.model.layers[0]).all()
