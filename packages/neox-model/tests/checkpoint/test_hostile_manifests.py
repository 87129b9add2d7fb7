"""Manifests that are hostile or damaged, with a right checksum, are refused by name, and nothing changes."""

import copy
import json
import random
import re
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from neox_config.facts.checkpoints import LATEST, MANIFEST
from neox_config.facts.learning_rate import WarmupThenDecay
from neox_model.checkpoint import load
from neox_model.checkpoint.contents import FORMAT, Manifest
from neox_model.checkpoint.directory import find_latest
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.load import load_weights
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.parallel.topology import create_groups
from neox_model.train.recent_losses import RecentLosses
from neox_model.train.state import TrainState
from support.checkpoint_runs import CYCLE, Run
from support.distributed import run_ranks
from support.refusals import refused

Edit = Callable[[dict[str, Any]], Any]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a checkpoint of a weight with optimizer states and random generators."""
    run = Run()
    run.train()
    return run.save(tmp_path / "checkpoints")


def write_manifest(folder: Path, contents: Any) -> None:
    text = json.dumps(contents, separators=(",", ":"), sort_keys=True)
    document = f'{{"format": "{FORMAT}", "crc32": {zlib.crc32(text.encode())}, "contents": {text}}}'
    (folder / MANIFEST).write_text(document)


def read_contents(folder: Path) -> dict[str, Any]:
    return json.loads((folder / MANIFEST).read_bytes())["contents"]


def snapshot(run: Run) -> Any:
    states = {
        key: value.tolist() if isinstance(value, torch.Tensor) else value
        for param in run.model.parameters()
        for key, value in run.engine.update.optimizer.state.get(param, {}).items()
    }
    generators = (random.getstate(), torch.get_rng_state().tolist())
    return (run.weights, states, run.engine.steps, run.state.state, run.schedule.state, generators)


class Progress(TrainState):
    """The state of a real training, under the name that `Run` uses."""

    state = property(TrainState.state_dict, TrainState.load_state_dict)


def in_progress() -> Run:
    """Return a run whose training state has a value of every kind."""
    run = Run()
    losses = RecentLosses(5, torch.device("cpu"))
    run.state = Progress(last_iteration=9, samples_per_iteration=16, recent_losses=losses)
    run.train()
    losses.load([2.5, 2.25])
    run.state.batch_sizes, run.state.left_out = ((0, 8), (1, 16)), ((16, 32), (48, 64))
    run.state.forward_pass = {"samples": 16, "loss": 2.5, "batch": "0123abcd", "precision": "bf16"}
    return run


def load_or_refuse(folder: Path) -> str | None:
    """Load the checkpoint; return the message of the error. A refused checkpoint must change nothing."""
    run = in_progress()
    before = snapshot(run)
    message = None
    try:
        run.load(folder.parent)
    except CheckpointError as error:
        message = str(error)
    assert message is None or (len(message) < 1000 and snapshot(run) == before)
    return message


def weight(contents: dict[str, Any]) -> dict[str, Any]:
    return contents["tensors"]["layers.0"]


def first_piece(contents: dict[str, Any]) -> dict[str, Any]:
    return weight(contents)["pieces"][0]


def point_at(name: str) -> Edit:
    """Move the shard of every tensor to another path."""

    def edit(contents: dict[str, Any]) -> None:
        contents["files"] = {name: 10**9}
        for record in contents["tensors"].values():
            for piece in record["pieces"]:
                piece["file"] = name

    return edit


def split_with_overlap(contents: dict[str, Any]) -> None:
    piece = first_piece(contents)
    weight(contents)["pieces"] = [
        piece | {"stop": 8, "key": "layers.0:0-8"},
        piece | {"start": 7, "stop": 11, "key": "layers.0:7-11"},
    ]


def other_blocks_that_overlap(contents: dict[str, Any]) -> None:
    piece = first_piece(contents)
    weight(contents)["pieces"] = [
        piece | {"block": [[0, 2], [0, 3]], "stop": 6},
        piece | {"block": [[1, 3], [0, 3]], "stop": 6},
    ]


CASES: dict[str, tuple[Edit, str]] = {
    "another folder": (
        point_at("../../../etc/passwd"),
        "'../../../etc/passwd', which is not a plain file name",
    ),
    "another checkpoint": (point_at("../global_step2/shard-00000.safetensors"), "which is not a plain file"),
    "an absolute path": (point_at("/etc/passwd"), "'/etc/passwd', which is not a plain file name"),
    "a folder": (point_at(".."), "'..', which is not a plain file name"),
    "no name": (point_at(""), "'', which is not a plain file name"),
    "a name of two lines": (point_at("a\nb"), "which is not a plain file name"),
    "a name too long": (point_at("x" * 256), "which is not a plain file name"),
    "too many elements": (lambda c: weight(c).update(shape=[2**62] * 20), "its shape is too large"),
    "too many dimensions": (lambda c: weight(c).update(shape=[1] * 300), "its shape is too large"),
    "an unknown file": (
        lambda c: first_piece(c).update(file="x"),
        "its file 'x' is not one of the checkpoint's",
    ),
    "a long name": (lambda c: first_piece(c).update(file="x" * 10**6), r"its file 'x{77}\.\.\.' is not one"),
    "control characters": (lambda c: first_piece(c).update(file="a\x1b[2J\n"), r"its file 'a.{1,2}x1b\[2J"),
    "text for a number": (
        lambda c: first_piece(c).update(stop="12"),
        "layers.0 / pieces / 0 / stop: Input should",
    ),
    "a fraction": (
        lambda c: first_piece(c).update(stop=1.5),
        "layers.0 / pieces / 0 / stop: Input should be",
    ),
    "a negative number": (
        lambda c: first_piece(c).update(start=-1),
        "start: Input should be greater than or",
    ),
    "a huge number": (lambda c: weight(c).update(shape=[2**64, 3]), "shape / 0: Input should be less than"),
    "an end before the start": (
        lambda c: first_piece(c).update(start=9, stop=3),
        "a range lies outside its block",
    ),
    "a range beyond its block": (lambda c: first_piece(c).update(stop=13), "a range lies outside its block"),
    "a block beyond its shape": (
        lambda c: first_piece(c).update(block=[[0, 5], [0, 3]]),
        "block lies outside",
    ),
    "a block of other dimensions": (
        lambda c: first_piece(c).update(block=[[0, 12]]),
        "a block lies outside its",
    ),
    "an unknown dtype": (lambda c: weight(c).update(dtype="F8"), "layers.0: its dtype 'F8' is unknown"),
    "the same piece twice": (
        lambda c: weight(c)["pieces"].append(first_piece(c)),
        "layers.0: its pieces overlap",
    ),
    "overlapping ranges": (split_with_overlap, "layers.0: its pieces overlap"),
    "overlapping blocks": (other_blocks_that_overlap, "layers.0: its pieces overlap"),
    "a missing piece": (lambda c: weight(c).update(pieces=[]), "12 elements of layers.0 are missing"),
    "an unknown field": (lambda c: c.update(extra=1), "extra: Unexpected keyword argument"),
    "a missing field": (lambda c: c.pop("layout"), "layout: Field required"),
    "no processes": (lambda c: c["layout"].update(data=0), "layout / data: Input should be greater"),
    "a huge random state": (
        lambda c: c["tensors"]["rng/0/torch"].update(shape=[2**40]),
        "elements of rng/0/torch are missing",
    ),
    "more than the file has": (
        lambda c: (
            weight(c).update(shape=[4, 10**9]),
            first_piece(c).update(block=[[0, 4], [0, 10**9]], stop=10**9),
        ),
        "bytes, but its tensors have",
    ),
    "a negative iteration": (lambda c: c.update(iteration=-1), "iteration: Input should be greater"),
    "a count that is text": (
        lambda c: c["training"].update(samples="x"),
        "training / samples: Input should be a valid integer",
    ),
    "batch sizes that are numbers": (
        lambda c: c["training"].update(batch_sizes=[1]),
        "training / batch_sizes",
    ),
    "a scalar that is text": (
        lambda c: c["optimizer_scalars"]["layers.0"]["step"].update(value="x"),
        "optimizer_scalars / layers.0 / step / value / .*: Input should be a valid",
    ),
    "a scalar of no dtype": (
        lambda c: c["optimizer_scalars"]["layers.0"].update(step=3),
        "optimizer_scalars / layers.0 / step: Input should be",
    ),
    "a schedule without a curve": (lambda c: c["schedule"].pop("curve"), "schedule has no curve"),
    "a schedule without updates": (
        lambda c: c["schedule"].pop("applied_updates"),
        "schedule has no curve or",
    ),
    "an engine without its counter": (lambda c: c["engine"].pop("steps"), "engine has no steps"),
    "an engine of text": (
        lambda c: c["engine"].update(steps="x"),
        "engine / steps / .*: Input should be a valid",
    ),
    "settings of another form": (
        lambda c: c["config"].update(in_effect={"model": 3}),
        "config / in_effect does not contain values by class and name",
    ),
    "an optimizer of another form": (
        lambda c: c["config"].update(optimizer=3),
        "config / optimizer does not contain values by name",
    ),
    "digests of another form": (
        lambda c: c["config"].update(samples_digest=3),
        "config / samples_digest does not contain digests by name",
    ),
    "a base of another form": (
        lambda c: c["config"].update(base="folder"),
        "config / base does not contain a folder, an iteration and a SHA-256",
    ),
    "a base of adapters with an iteration that is text": (
        lambda c: c["config"].update(base={"folder": "x", "iteration": "1", "manifest_sha256": "0"}),
        "config / base does not contain a folder, an iteration and a SHA-256",
    ),
    "a batch size that is text": (
        lambda c: c["config"].update(samples_per_iteration="x"),
        "config / samples_per_iteration is not a count",
    ),
    "a counter with a fraction": (
        lambda c: c["engine"].update(cur_iter=0.5),
        "engine / cur_iter is not an integer",
    ),
    "a counter of more than 64 bits": (
        lambda c: c["engine"].update(cur_iter=2**70),
        "engine / cur_iter is not an integer",
    ),
    "a loss scale that is too large": (
        lambda c: c["engine"].update(cur_scale=1e300),
        "engine / cur_scale is too large",
    ),
    "a scalar that does not fit its dtype": (
        lambda c: c["optimizer_scalars"]["layers.0"]["step"].update(value=float("nan"), dtype="I8"),
        "optimizer_scalars / step does not fit its dtype",
    ),
    "a scalar of another optimizer without a value": (
        lambda c: (
            c.update(optimizer="DeepSpeedCPUAdam"),
            c["optimizer_scalars"]["layers.0"]["step"].update(value=None, dtype=None),
        ),
        "the state 'step' of layers.0 is not a finite number",
    ),
    "a random state of other dimensions": (
        lambda c: c["tensors"]["rng/0/python"].update(
            shape=[5, 125],
            pieces=[
                piece | {"block": [[0, 5], [0, 125]]} for piece in c["tensors"]["rng/0/python"]["pieces"]
            ],
        ),
        "rng/0/python is not one-dimensional",
    ),
    "a random state that is another one": (
        lambda c: c["tensors"].update({"rng/0/python": c["tensors"]["rng/0/numpy"]}),
        "the state 'python' of the random generators is missing or damaged",
    ),
    "no random state of one kind": (
        lambda c: c["tensors"].pop("rng/0/torch"),
        "the state 'torch' of the random generators is missing or damaged",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_hostile_manifest_is_refused_with_its_name_and_changes_nothing(folder, case):
    edit, message = CASES[case]
    contents = read_contents(folder)
    edit(contents)
    write_manifest(folder, contents)
    found = load_or_refuse(folder)
    assert found is not None
    assert str(folder) in found
    assert re.search(message, found), found


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"peak": "x"}, "peak"),
        ({"warmup": float("nan")}, "warmup"),
        ({"decay_iterations": 0}, "decay_iterations"),
        ({"style": "none"}, "style"),
        ({"extra": 1}, "extra"),
    ],
)
def test_learning_rate_curve_of_a_hostile_manifest_is_refused(folder, values, place):
    curve = WarmupThenDecay(style="linear", peak=0.1, floor=0.0, warmup=0.1, decay_iterations=9)
    contents = read_contents(folder)
    contents["schedule"]["curve"] = asdict(curve) | values
    write_manifest(folder, contents)
    run = Run()
    run.schedule.curve = curve
    with refused(CheckpointError, place, code="damaged-manifest"):
        run.load(folder.parent, schedule_source="checkpoint")
    assert run.schedule.curve is curve


@pytest.mark.parametrize(
    ("kind", "values", "place"),
    [
        ("Curve", {}, "class: 'Curve'"),
        (["OneCycle"], {}, "OneCycle"),
        ("OneCycle", {"cycle_max_mom": 1.0}, "curve / cycle_max_mom: "),
        ("OneCycle", {"cycle_min_lr": -1.0}, "curve / cycle_min_lr: "),
        ("OneCycle", {"cycle_first_step_size": 0}, "curve / cycle_first_step_size: "),
        ("OneCycle", {"peak": 1.0}, "curve / peak: "),
        ("LRRangeTest", {}, "curve / lr_range_test_min_lr: "),
    ],
)
def test_class_of_a_hostile_curve_is_refused(folder, kind, values, place):
    contents = read_contents(folder)
    contents["schedule"]["class"] = kind
    contents["schedule"]["curve"] = asdict(CYCLE) | values
    write_manifest(folder, contents)
    with refused(CheckpointError, place, code="damaged-manifest"):
        Run().load(folder.parent, schedule_source="checkpoint")


def test_learning_rate_curve_of_a_checkpoint_is_restored(folder):
    curve = WarmupThenDecay(style="linear", peak=0.1, floor=0.0, warmup=0.1, decay_iterations=9)
    contents = read_contents(folder)
    contents["schedule"]["curve"] = asdict(curve) | {"peak": 1, "floor": 0.01}
    write_manifest(folder, contents)
    run = Run()
    run.schedule.curve = curve
    run.load(folder.parent, schedule_source="checkpoint")
    assert run.schedule.curve == replace(curve, peak=1.0, floor=0.01)


@pytest.mark.parametrize("error", [LookupError, TypeError, ValueError, AttributeError, OverflowError])
@pytest.mark.parametrize("place", ["_check_weights", "_fill_weights", "check_scalars", "_chosen_curve"])
def test_a_bug_while_loading_is_not_reported_as_a_damaged_checkpoint(folder, monkeypatch, place, error):
    def fail(*arguments: Any, **options: Any) -> None:
        raise error("planted")

    monkeypatch.setattr(load, place, fail)
    with refused(error, "planted"):
        Run().load(folder.parent)


def fail_with_a_bug_on_one_rank(directory: str) -> str:
    run = Run(groups=create_groups(1, 1))
    run.train()
    run.save(Path(directory))
    if dist.get_rank() == 1:
        load._check_weights = lambda *arguments: {}["planted"]
    try:
        run.load(Path(directory))
    except (CheckpointError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow
def test_other_ranks_name_the_rank_and_the_bug(tmp_path):
    first, second = run_ranks(fail_with_a_bug_on_one_rank, size=2, directory=str(tmp_path))
    assert second == "KeyError: 'planted'"
    assert first.startswith("CheckpointError: loading ")
    assert first.endswith("failed on rank 1: KeyError: 'planted'")


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "{}", "[]", "3", "", "null", '{"format": NaN}', "\xff", '{"format": "' + "x" * 10**6],
)
def test_text_that_is_no_manifest_is_refused_with_its_name(folder, text):
    (folder / MANIFEST).write_text(text, encoding="latin-1")
    found = load_or_refuse(folder)
    assert found is not None
    assert f"{folder / MANIFEST} " in found


def test_latest_is_quoted_in_80_characters(tmp_path):
    (tmp_path / LATEST).write_text("\x1b]0;" + "x" * 10**6)
    with refused(CheckpointError, code="no-such-checkpoint") as raised:
        find_latest(tmp_path)
    assert "\x1b" not in str(raised.value)


def test_damaged_shard_overwrites_no_weight_even_of_a_model_alone(tmp_path):
    run = Run(layers=2)
    run.train()
    folder = run.save(tmp_path)
    contents = read_contents(folder)
    second = contents["tensors"]["layers.1"]["pieces"][0]
    second["crc32"] ^= 1
    write_manifest(folder, contents)
    model = Run(layers=2).model
    before = [param.tolist() for param in model.parameters()]
    with refused(CheckpointError, "shard-00000.safetensors", "layers.1"):
        load_weights(tmp_path, model=model, groups=SINGLE_PROCESS, config=run.config)
    assert [param.tolist() for param in model.parameters()] == before


def test_numbers_that_are_not_finite_are_no_json_and_come_back(folder):
    contents = read_contents(folder)
    contents["engine"]["scale"] = float("inf")
    write_manifest(folder, contents)
    # As an earlier version wrote it.
    assert "Infinity" in (folder / MANIFEST).read_text()
    manifest = Manifest.read(folder)
    assert manifest.engine["scale"] == float("inf")
    (folder / MANIFEST).write_text(manifest.to_json())
    stored = json.loads((folder / MANIFEST).read_text(), parse_constant=pytest.fail)["contents"]
    assert stored["engine"]["scale"] is None
    assert stored["nonfinite"] == {"engine": {"scale": "inf"}}
    assert Manifest.read(folder) == manifest


VALUES = (
    *(None, True, 0, 1, -1, 2**31, 2**63, 10**30, 0.5, float("nan"), float("inf")),
    *("", "x", "../x", "/etc/passwd", "F16", "rng/0/torch", "layers.0", "\ud800", "\0", "x" * 300),
    *([], [0], [[0, 0]], [[0, 99]], {}, {"x": 1}, {"value": 1, "dtype": "I8"}),
)


def mutated(contents: Any, chance: random.Random) -> Any:
    """Replace, remove, copy or add one to three values anywhere in a manifest."""
    contents = copy.deepcopy(contents)
    for _ in range(chance.randint(1, 3)):
        place, key = chance.choice(list(_places(contents)))
        action = chance.choice(("replace", "replace", "remove", "copy", "nudge"))
        if action == "remove":
            del place[key]
        elif action == "copy":
            other, name = chance.choice(list(_places(contents)))
            place[key] = copy.deepcopy(other[name]) if key in _keys(place) else None
        elif action == "nudge" and isinstance(place[key], int):
            place[key] += chance.choice((-1, 1, 7))
        else:
            place[key] = chance.choice(VALUES)
    return contents


def _keys(place: Any) -> Any:
    return place.keys() if isinstance(place, dict) else range(len(place))


def _places(value: Any) -> Any:
    """Yield the containers and keys of all values inside a value."""
    for key in list(_keys(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def fuzz(folder: Path, *, seed: int, cases: int) -> dict[str, int]:
    """Load mutated manifests; return how many were refused, and how many loaded."""
    folder = in_progress().save(folder)
    contents = read_contents(folder)
    chance, counts = random.Random(seed), {"refused": 0, "loaded": 0}
    for _ in range(cases):
        write_manifest(folder, mutated(contents, chance))
        message = load_or_refuse(folder)
        counts["loaded" if message is None else "refused"] += 1
        assert message is None or str(folder) in message
    return counts


def test_mutated_manifests_load_or_are_refused(tmp_path):
    counts = fuzz(tmp_path, seed=1, cases=300)
    assert counts["refused"] > 200


@pytest.mark.sweep
def test_three_thousand_mutated_manifests_load_or_are_refused(tmp_path):
    counts = fuzz(tmp_path, seed=2, cases=3000)
    assert counts["refused"] > 2000
