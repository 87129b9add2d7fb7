"""What is restored, what is left out and what is refused, on one process with a plain optimizer as engine."""

import errno
import json
import logging
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from neox_model.checkpoint import CheckpointError, load_checkpoint, load_weights, save, save_checkpoint
from neox_model.checkpoint.contents import MANIFEST, Manifest
from neox_model.checkpoint.load import read_training_state
from neox_model.parallel.groups import ALONE, Groups
from neox_model.parallel.logical import logical_parameter
from neox_model.parallel.topology import create_groups
from support.distributed import run_ranks


@dataclass
class Curve:
    peak: float = 0.1
    warmup: float = 0.01


class Remembers:
    """A training state, or a schedule, that is its dictionary."""

    def __init__(self, **state: int) -> None:
        self.state, self.curve = state, Curve()

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


class Model(nn.Module):
    def __init__(self, width: int, layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ParameterList(
            logical_parameter((width, 3), init=lambda tensor, generator: None) for _ in range(layers)
        )
        for param in self.layers:
            nn.init.normal_(param)


class Engine:
    """As much of DeepSpeed's engine as a checkpoint touches at ZeRO stage 0 in float32."""

    def __init__(self, model: nn.Module, optimizer: type[torch.optim.Optimizer]) -> None:
        self.optimizer = optimizer(model.parameters(), lr=0.1)
        self.global_steps = self.global_samples = 0


class Run:
    def __init__(
        self, *, width: int = 4, layers: int = 1, optimizer: Any = torch.optim.AdamW, groups: Groups = ALONE
    ):
        self.model = Model(width, layers)
        self.engine = Engine(self.model, optimizer)
        self.state, self.schedule = Remembers(tokens=0), Remembers(applied_updates=0)
        self.groups = groups
        self.config = {
            "in_effect": {
                "model": {"hidden_size": width, "num_layers": layers, "activation": "gelu"},
                "training": {"train_batch_size": 16, "optimizer.params.adam_w_mode": True},
            }
        }
        self.iteration: int | None = 0

    def train(self) -> None:
        for param in self.model.parameters():
            param.grad = torch.randn_like(param)
        self.engine.optimizer.step()
        self.iteration += 1
        self.engine.global_steps += 1
        self.state.state = {"tokens": 10 * self.iteration}
        self.schedule.state = {"applied_updates": self.iteration}

    def save(self, directory: Path, **options: Any) -> Path:
        return save_checkpoint(directory, iteration=self.iteration, **self._parts(), **options)

    def load(self, directory: Path, **options: Any) -> None:
        self.iteration = load_checkpoint(directory, **self._parts(), seed=1, **options)

    def _parts(self) -> dict[str, Any]:
        names = ("model", "engine", "groups", "schedule", "state", "config")
        return {name: getattr(self, name) for name in names}

    @property
    def weights(self) -> list[Any]:
        return [param.tolist() for param in self.model.parameters()]

    @property
    def states(self) -> dict[str, Any]:
        first = self.engine.optimizer.state[self.model.layers[0]]
        return {key: value.tolist() for key, value in first.items()}


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
    assert run.iteration == run.engine.global_steps == 2
    assert (run.weights, run.states) == (trained.weights, trained.states)
    assert (run.state.state, run.schedule.state) == ({"tokens": 20}, {"applied_updates": 2})


def test_an_empty_folder_means_from_scratch_for_training_and_is_an_error_for_generation(tmp_path):
    run = Run()
    run.load(tmp_path / "none")
    assert run.iteration is None
    with pytest.raises(CheckpointError, match="none holds no checkpoint"):
        load_weights(tmp_path / "none", model=run.model, groups=ALONE, config={})


def test_finetune_takes_the_weights_alone(tmp_path, trained):
    trained.save(tmp_path)
    run = Run()
    before = torch.get_rng_state()
    run.load(tmp_path, finetune=True)
    assert run.iteration == run.engine.global_steps == 0
    assert run.weights == trained.weights
    assert not run.engine.optimizer.state
    assert (run.state.state, run.schedule.state) == ({"tokens": 0}, {"applied_updates": 0})
    assert torch.equal(torch.get_rng_state(), before)


def test_optimizer_states_can_be_left_out_when_loading_or_saving(tmp_path, trained):
    trained.save(tmp_path / "whole")
    smaller = trained.save(tmp_path / "weights", save_optimizer=False)
    assert list(Manifest.read(smaller).weight_names) == ["layers.0"]
    for directory in ("whole", "weights"):
        run = Run()
        run.load(tmp_path / directory, load_optimizer=False)
        assert run.weights == trained.weights
        assert not run.engine.optimizer.state
        assert run.schedule.state == {"applied_updates": 2}
    with pytest.raises(CheckpointError, match=r"holds no optimizer states .* set no-load-optim: true"):
        Run().load(tmp_path / "weights")


def _draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), torch.rand(1).item()]


def test_random_generators_go_on_where_they_were(tmp_path, trained):
    random.gauss(0, 1), np.random.normal()
    trained.save(tmp_path)
    expected = _draw() + _draw()
    Run().load(tmp_path)
    assert _draw() + _draw() == expected


def test_random_generators_left_alone_or_started_anew(tmp_path, trained, caplog):
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
    assert warnings == {"random generators start anew, not from the checkpoint: it holds none (no-save-rng)"}


def test_learning_rate_curves_must_agree_or_one_must_be_chosen(tmp_path, trained):
    trained.save(tmp_path)
    run = Run()
    run.schedule.curve = Curve(peak=0.2)
    with pytest.raises(CheckpointError, match=r"peak 0\.1 there, 0.2 here; set override-lr-scheduler"):
        run.load(tmp_path)
    run.load(tmp_path, schedule_source="config")
    assert (run.schedule.curve, run.schedule.state) == (Curve(peak=0.2), {"applied_updates": 2})
    run.load(tmp_path, schedule_source="checkpoint")
    assert (run.schedule.curve, run.schedule.state) == (Curve(peak=0.1), {"applied_updates": 2})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 5}, r"layers.0 has the shape \(4, 3\) .* \(5, 3\) .* hidden-size: 4 there, 5 here"),
        ({"layers": 2}, "layers.1 is not in the checkpoint; num-layers: 1 there, 2 here"),
    ],
)
def test_another_model_is_refused_with_the_parameters_that_differ(tmp_path, trained, sizes, message):
    trained.save(tmp_path)
    difference = message.rpartition("; ")[2].rpartition(" .* ")[2]
    with pytest.raises(CheckpointError, match=f"not this configuration's; {difference}; .* finetune: true"):
        Run(**sizes).load(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        Run(**sizes).load(tmp_path, finetune=True)
    run = Run(**sizes)
    with pytest.raises(CheckpointError, match=difference):
        load_weights(tmp_path, model=run.model, groups=ALONE, config=run.config)


def changed(run: Run, kind: str, **values: Any) -> Run:
    """The run with other values in effect; a name's double underscore is a dot."""
    named = {name.replace("__", "."): value for name, value in values.items()}
    in_effect = run.config["in_effect"]
    run.config = run.config | {"in_effect": in_effect | {kind: in_effect[kind] | named}}
    return run


def test_another_function_of_the_same_weights_is_refused_but_by_finetune(tmp_path, trained, caplog):
    trained.save(tmp_path)
    run = changed(Run(), "model", activation="relu")
    before = run.weights
    with pytest.raises(CheckpointError, match=r"activation: gelu there, relu here; .*finetune: true"):
        run.load(tmp_path)
    with pytest.raises(CheckpointError, match="activation: gelu there, relu here; give the checkpoint's"):
        load_weights(tmp_path, model=run.model, groups=ALONE, config=run.config)
    assert run.weights == before
    with caplog.at_level(logging.WARNING):
        run.load(tmp_path, finetune=True)
    assert run.weights == trained.weights
    assert caplog.messages == [
        "the model is changed by finetune:\n"
        "  parameter   checkpoint  this run\n"
        "  activation  gelu        relu"
    ]


def test_another_training_is_one_table_in_the_log(tmp_path, trained, caplog):
    trained.save(tmp_path)
    run = changed(Run(), "training", train_batch_size=32, warmup=0.5)
    with caplog.at_level(logging.WARNING):
        run.load(tmp_path, finetune=True)
        assert caplog.messages == []
        run.load(tmp_path)
    # An older version without `warmup` had its default.
    assert caplog.messages == [
        "the training continues with other settings than the checkpoint's:\n"
        "  parameter         checkpoint  this run\n"
        "  train-batch-size  16          32\n"
        "  warmup            0.01        0.5"
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        run.load(tmp_path, schedule_source="checkpoint")
    assert "warmup" not in caplog.text


def test_states_that_mean_something_else_are_refused(tmp_path, trained):
    trained.save(tmp_path)
    run = changed(Run(), "training", optimizer__params__adam_w_mode=False)
    with pytest.raises(
        CheckpointError, match=r"params.adam-w-mode: true there, false here; .*no-load-optim: true"
    ):
        run.load(tmp_path)
    run.load(tmp_path, load_optimizer=False)
    assert run.weights == trained.weights
    assert not run.engine.optimizer.state


def test_the_settings_of_an_unknown_version_are_said_to_be_unknown(tmp_path, trained, caplog):
    trained.config = {"num_layers": "a"}
    trained.save(tmp_path)
    with caplog.at_level(logging.WARNING):
        Run().load(tmp_path)
    (message,) = caplog.messages
    assert message.startswith(
        "the checkpoint was written by another version, and its settings are not compared"
    )


def test_an_older_checkpoint_says_how_many_samples_were_read(tmp_path, trained):
    trained.config |= {"samples_per_iteration": 16, "eval_interval": 2, "eval_iters": 3}
    trained.state.state = {"iteration": 2}
    trained.save(tmp_path)
    expected = {"iteration": 2, "samples": 32, "validation_samples": 48}
    assert read_training_state(tmp_path, groups=ALONE) == expected
    run = Run()
    run.load(tmp_path)
    assert run.state.state == expected
    assert read_training_state(tmp_path / "none", groups=ALONE) is None


def test_a_checkpoint_that_cannot_say_how_many_samples_were_read_is_refused(tmp_path, trained):
    trained.state.state = {"iteration": 2}
    trained.save(tmp_path)
    with pytest.raises(CheckpointError, match="does not record how many samples were read; set finetune"):
        Run().load(tmp_path)


def test_a_smaller_model_does_not_silently_leave_layers_out(tmp_path):
    run = Run(layers=2)
    run.train()
    run.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"layers\.1 is in the checkpoint and not in this model"):
        Run().load(tmp_path, finetune=True)


def test_another_optimizer_is_refused_unless_its_states_mean_the_same(tmp_path, trained):
    trained.save(tmp_path)
    with pytest.raises(CheckpointError, match="states are AdamW's, this run's optimizer is SGD"):
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
    run.engine.optimizer.state[run.model.layers[0]] = {"history": [1, 2]}
    with pytest.raises(CheckpointError, match=r"SGD keeps the state 'history' of layers.0 as list.* no-save"):
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
        f"to go on from the complete checkpoint global_step2, run: echo global_step2 > {tmp_path / 'latest'}"
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


def test_another_format_says_so(tmp_path, trained):
    path = trained.save(tmp_path) / MANIFEST
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"format": "neox-checkpoint-9"}))
    with pytest.raises(CheckpointError, match="has the format 'neox-checkpoint-9', this version reads"):
        Run().load(tmp_path)


def test_a_full_disk_leaves_the_last_checkpoint_and_nothing_half(tmp_path, trained, monkeypatch):
    trained.save(tmp_path)
    trained.train()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    with monkeypatch.context() as patched:
        patched.setattr("neox_model.checkpoint.shards.os.fsync", full)
        with pytest.raises(CheckpointError, match=r"saving .*global_step3 failed: .*No space left on device"):
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


def test_states_on_nvme_are_refused(tmp_path, trained):
    trained.engine.optimizer.swap_optimizer = True
    with pytest.raises(CheckpointError, match="offloaded to nvme cannot be checkpointed"):
        trained.save(tmp_path)


def fail_on_one_rank(directory: str) -> list[str]:
    """Saving, then loading, with a failure that only rank 1 meets."""
    torch.manual_seed(1)
    run = Run(groups=create_groups(1, 1))
    run.train()
    run.save(Path(directory))
    run.train()
    messages = []
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
    return messages


def test_a_failure_on_one_rank_is_the_same_error_on_all(tmp_path):
    first, second = run_ranks(fail_on_one_rank, size=2, directory=str(tmp_path))
    assert first == second
    saving, loading = first
    assert "failed on rank 1" in saving
    assert "No space left on device" in saving
    assert "shard-00001.safetensors cannot be read" in loading
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "latest"]


def test_another_order_of_samples_is_said_when_training_continues(tmp_path, trained, caplog):
    trained.config = trained.config | {"samples_digest": {"train": "a", "valid": "c"}}
    trained.save(tmp_path)
    run = Run()
    with caplog.at_level(logging.WARNING):
        for digests in ({"train": "b", "valid": "c"}, {"train": "a", "valid": "c"}, {"train": "a"}):
            run.config = run.config | {"samples_digest": digests}
            run.load(tmp_path)
    assert caplog.messages == [
        "training samples come in another order than before the checkpoint: some will be read twice, and "
        "some not at all"
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
    broken = second.data if place == "weight" else run.engine.optimizer.state[second]["exp_avg"]
    broken[2, 1] = value
    name = "layers.1" if place == "weight" else "layers.1/exp_avg"
    with pytest.raises(
        CheckpointError, match=f"{name} held values that are not finite; earlier checkpoints are kept"
    ):
        run.save(tmp_path, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "latest"]
    Run(layers=2).load(tmp_path)


def test_states_that_are_not_saved_are_not_judged(tmp_path):
    run = two_layers()
    run.engine.optimizer.state[run.model.layers[0]]["exp_avg"][0, 0] = math.nan
    run.save(tmp_path, save_optimizer=False)


def test_weights_that_are_not_finite_are_not_loaded_and_the_one_before_is_offered(tmp_path, monkeypatch):
    run = two_layers()
    run.save(tmp_path)
    run.train()
    run.model.layers[0].data[0, 0] = math.nan
    # As a version that does not look would write it.
    monkeypatch.setattr(save, "_check_finite", lambda parts: None)
    run.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"layers\.0 holds values that are not finite; .* global_step1"):
        Run(layers=2).load(tmp_path)


def test_all_that_is_not_finite_is_counted(tmp_path):
    run = two_layers()
    for parameter in run.model.parameters():
        parameter.data.fill_(math.nan)
    with pytest.raises(CheckpointError, match=r"layers\.0 and 1 more tensors held"):
        run.save(tmp_path)
    assert torch.isnan(run.model.layers[0]).all()
