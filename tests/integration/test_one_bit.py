"""Trainings with 1-bit optimizers on real ranks: bytes, equal replicas, skips, tied weights, convergence."""

import json
import math
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, distributed

from support.corpus import write_corpus
from support.distributed import run_ranks
from support.runs import a_run

FREEZE = 2
OPTIMIZER = {"lr": 0.01, "eps": 1e-6, "betas": [0.9, 0.95]}
LOCAL = {"local_step_scaler": 1, "local_step_clipper": 4}
SETTINGS = {"num_layers": 2, "train_micro_batch_size_per_gpu": 2, "weight_decay": 0.1}


def arguments_of(optimizer: str, freeze: int = FREEZE) -> dict:
    """Return arguments with which an optimizer compresses after `freeze` updates."""
    if optimizer == "ZeroOneAdam":
        return {"var_freeze_step": freeze, "var_update_scaler": freeze}
    return {"freeze_step": freeze}


def started(precision: dict, *, optimizer: str = "OneBitAdam", params: dict | None = None, **settings):
    """Return a run of the present world, and its batches."""
    from support import layouts
    from support.settings import resolved_from

    wanted = {
        **layouts.SETTINGS,
        **layouts.SMALL,
        **SETTINGS,
        "optimizer": {
            "type": optimizer,
            "params": OPTIMIZER | arguments_of(optimizer) | (params or {}),
        },
        **precision,
        **settings,
    }
    resolved = resolved_from(wanted, devices=distributed.get_world_size())
    training = layouts.start(resolved)
    return training, layouts.batches_of(resolved, training.groups)


def is_same_everywhere(tensors: list[Tensor], group) -> bool:
    """Return True if all ranks of a group have the same bits."""
    flat = torch.cat([each.detach().float().reshape(-1) for each in tensors])
    rows = [torch.empty_like(flat) for _ in range(group.size)]
    distributed.all_gather(rows, flat, group=group.process_group)
    return all(torch.equal(row, rows[0]) for row in rows)


def replicated(training) -> list[Tensor]:
    """Return what all replicas must hold alike."""
    mixed = training.engine.update.mixed
    states = [
        value
        for state in mixed.optimizer.state.values()
        for name, value in state.items()
        if name not in mixed.optimizer.replica_states
    ]
    return [*mixed.parameters, *mixed.masters, *states]


def count_bytes(optimizer: str, updates: int, params: dict) -> dict:
    """Return the bytes that this rank sends in an update before and after the freeze, and those of a ring."""
    from neox_model.parallel import collectives, gradient_reduction

    training, batches = started({}, optimizer=optimizer, params=params, hidden_size=66, num_attention_heads=6)
    mixed, reduced = training.engine.update.mixed, []
    average, reduce = mixed.optimizer.average, distributed.all_reduce

    def counting(tensor, *arguments, **settings):
        if settings["group"] is training.groups.data.process_group:
            # What a rank of a ring sends.
            reduced.append(2 * (size - 1) * tensor.numel() * tensor.element_size() // size)
        return reduce(tensor, *arguments, **settings)

    size, sent = training.groups.data.size, []
    modules = (collectives.dist, gradient_reduction.distributed)
    with patch.object(modules[0], "all_reduce", counting), patch.object(modules[1], "all_reduce", counting):
        for _ in range(updates):
            before = average.sent_bytes
            reduced.clear()
            training.step(batches)
            sent.append(sum(reduced) + average.sent_bytes - before)
    elements = sum(parameter.numel() for parameter in mixed.parameters)
    return {"sent": sent, "ring": 2 * (size - 1) * 4 * elements // size}


def test_a_sixteenth_of_the_bytes_is_sent_after_the_freeze():
    for found in run_ranks(count_bytes, size=2, optimizer="OneBitAdam", updates=FREEZE + 2, params={}):
        before, after = found["sent"][:FREEZE], found["sent"][FREEZE:]
        assert all(found["ring"] <= each <= 1.01 * found["ring"] + 100 for each in before)
        assert all(each <= found["ring"] / 16 for each in after)
        assert all(each >= found["ring"] / 33 for each in after)


def test_local_steps_send_only_the_norm_and_variance_updates_the_gradients():
    # The variance is updated in 1, 2 and 4; 5 synchronizes; 6 and 7 are local steps, 8 synchronizes.
    params = {"var_freeze_step": 4, **LOCAL}
    for found in run_ranks(count_bytes, size=2, optimizer="ZeroOneAdam", updates=8, params=params):
        ring = found["ring"]
        limits = {"norm": 16, "bits": ring / 16, "gradients": 1.01 * ring + 100}
        kinds = [next(kind for kind in limits if sent <= limits[kind]) for sent in found["sent"]]
        assert kinds == ["gradients", "gradients", "bits", "gradients", "bits", "bits", "norm", "bits"]


def train_replicas(precision: dict, optimizer: str) -> dict:
    """Train beyond the freeze; on the last update but one, one replica has a gradient that is not finite."""
    from neox_model.optim import mixed_precision

    training, batches = started(precision, optimizer=optimizer, gradient_clipping=0.5)
    compute = mixed_precision.global_gradient_norm
    mixed, data = training.engine.update.mixed, training.groups.data
    own_norms: list[str] = []
    joined: list[str] = []

    def join_tensors(pending):
        norms = torch.stack(list(pending.tensor_norms().values()))
        joined.append(str(float(norms.norm())))

    training.engine.update.before(join_tensors)
    equal, skipped, norms, kept = [], [], [], True

    def noting(parameters, gradients, groups, **named):
        norm = compute(parameters, gradients, groups, **named)
        own_norms.append(str(float(norm)))
        return norm

    for update in range(FREEZE + 4):
        before = [each.clone() for each in replicated(training)] if update else []
        is_broken = update == FREEZE + 2 and data.rank == 1
        hook = mixed.parameters[0].register_hook(lambda gradient: gradient * math.nan) if is_broken else None
        with patch.object(mixed_precision, "global_gradient_norm", noting):
            training.step(batches)
        if hook is not None:
            hook.remove()
        equal.append(is_same_everywhere(replicated(training), data))
        skipped.append(bool(training.engine.update.skipped))
        norms.append(str(float(training.engine.update.grad_norm)))
        if skipped[-1]:
            kept &= all(map(torch.equal, before, replicated(training)))
    return {
        "equal": equal,
        "skipped": skipped,
        "kept": kept,
        "norms": norms,
        "own": own_norms,
        "joined": joined,
    }


PRECISIONS = {
    "fp32": {},
    "bf16": {"precision": "bfloat16"},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6}},
}


FAMILY = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
SWEPT = [(name, precision) for name in FAMILY for precision in PRECISIONS]


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        pytest.param(*cell, marks=[] if cell == ("OneBitAdam", "fp32") else pytest.mark.sweep)
        for cell in SWEPT
    ],
)
def test_replicas_stay_equal_and_skip_together(optimizer, precision):
    found = run_ranks(train_replicas, size=2, precision=PRECISIONS[precision], optimizer=optimizer)
    expected = [update == FREEZE + 2 for update in range(FREEZE + 4)]
    for each in found:
        assert all(each["equal"])
        assert each["skipped"] == expected
        assert each["kept"]
    assert found[0]["norms"] == found[1]["norms"]
    for one, other in zip(found[0]["norms"], found[0]["joined"], strict=True):
        assert float(one) == pytest.approx(float(other), rel=1e-4, nan_ok=True)
    own = [[float(norm) for norm in each["own"]] for each in found]
    for update, norm in enumerate(map(float, found[0]["norms"])):
        if update == FREEZE + 2:
            assert not math.isfinite(norm)
        elif precision != "fp16":
            # The root of the mean square over replicas, whose gradients differ after the freeze.
            assert (own[0][update] == own[1][update]) == (update < FREEZE)
            assert norm == pytest.approx(math.hypot(own[0][update], own[1][update]) / math.sqrt(2), rel=1e-6)


def train_split(optimizer: str, params: dict) -> list[list[bool]]:
    """Return, by update, whether replicas and what tensor-parallel ranks do not split are the same."""
    from neox_model.parallel.logical import split_dim_of
    from neox_model.train.callbacks.replica_check import CopiesDifferError, ReplicaCheck

    training, batches = started(
        {"precision": "bfloat16"}, optimizer=optimizer, params=params, model_parallel_size=2
    )
    mixed, groups = training.engine.update.mixed, training.groups
    copies, equal = ReplicaCheck(1), []
    run = a_run(copies, engine=training.engine, groups=groups)
    copies.on_load()
    pairs = list(zip(mixed.parameters, mixed.masters, strict=True))
    whole = [master for parameter, master in pairs if split_dim_of(parameter) is None]
    for update in range(FREEZE + 7):
        training.step(batches)
        run.state.iteration = update
        copies.before_save()
        equal.append(
            [is_same_everywhere(mixed.parameters, groups.data), is_same_everywhere(whole, groups.model)]
        )
    if groups.data.rank == 1:
        shared = getattr(mixed.optimizer, "shared_weight", lambda weight: weight)(mixed.masters[0])
        shared.data.view(torch.int32).view(-1)[3] ^= 1 << 20
    run.state.iteration = FREEZE + 7
    with pytest.raises(CopiesDifferError, match="shared weight" if params == LOCAL else "master weight"):
        copies.before_save()
    return equal


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", [*FAMILY, "ZeroOneAdam, local"])
def test_replicas_of_tensor_parallel_ranks_stay_equal_where_they_are_synchronized(optimizer):
    """ZeroOneAdam synchronizes updates 1 to 4 and 8; 5 to 7 and 9 are local steps."""
    is_local = optimizer.endswith("local")
    found = run_ranks(
        train_split, size=4, optimizer=optimizer.split(",")[0], params=LOCAL if is_local else {}
    )
    local = {5, 6, 7, 9} if is_local else {}
    assert found == [[[update not in local, True] for update in range(1, FREEZE + 8)]] * 4


def train_stages(optimizer: str, params: dict) -> list[bool]:
    """Return whether copies of the tied embedding on both stages are the same; compare replicas."""
    from neox_model.train.callbacks.replica_check import ReplicaCheck

    training, batches = started(
        {"precision": "bfloat16"}, optimizer=optimizer, params=params, pipe_parallel_size=2
    )
    copies, equal = ReplicaCheck(1), []
    run = a_run(copies, engine=training.engine, groups=training.groups)
    copies.on_load()
    ties = training.engine.update.mixed._ties
    for update in range(FREEZE + 4):
        training.step(batches)
        run.state.iteration = update
        copies.before_save()
        equal.append(is_same_everywhere([master for _, master, _ in ties], training.groups.pipe))
    assert ties
    return equal


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", [*FAMILY, "ZeroOneAdam, local"])
def test_tied_weights_of_pipeline_stages_stay_equal(optimizer):
    """With local steps, those of one replica: they have its own weights."""
    params = LOCAL if optimizer.endswith("local") else {}
    found = run_ranks(train_stages, size=4, optimizer=optimizer.split(",")[0], params=params)
    assert found == [[True] * (FREEZE + 4)] * 4


def final_losses(optimizer: str, updates: int, freeze: int) -> list[float]:
    """Return the losses of a run."""
    from support import layouts
    from support.settings import resolved_from

    params = {"lr": 0.003, "betas": [0.9, 0.95]}
    if optimizer != "Adam":
        params |= arguments_of(optimizer, freeze)
    if optimizer == "ZeroOneAdam":
        params |= {"local_step_scaler": freeze, "local_step_clipper": 4}
    scheduler = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 20, "total_num_steps": updates}}
    wanted = {
        **layouts.SETTINGS,
        **layouts.SMALL,
        "num_layers": 2,
        "train_iters": updates,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": optimizer, "params": params},
        "scheduler": scheduler,
    }
    resolved = resolved_from(wanted, devices=distributed.get_world_size())
    training = layouts.start(resolved)
    with patch.object(layouts, "ITERATIONS", updates):
        batches = layouts.batches_of(resolved, training.groups)
        return [float(training.step(batches).loss) for _ in range(updates)]


@pytest.mark.sweep
def test_the_loss_is_within_two_percent_of_adams():
    updates, freeze = 300, 60
    means = {}
    for optimizer in ("Adam", "OneBitAdam", "ZeroOneAdam"):
        losses = run_ranks(final_losses, size=2, optimizer=optimizer, updates=updates, freeze=freeze)[0]
        means[optimizer] = sum(losses[-50:]) / 50
        means[f"{optimizer}, first"] = losses[0]
    assert means["Adam"] < 0.8 * means["Adam, first"]
    for optimizer in ("OneBitAdam", "ZeroOneAdam"):
        assert means[optimizer] == pytest.approx(means["Adam"], rel=0.02), means


def train_to_its_end(folder: str, data_path: str) -> None:
    """Train to an average, and beyond it; evaluate the last checkpoint of each again."""
    from neox_model.parallel.topology import create_groups
    from neox_model.train.open_run import train_in
    from support.settings import SMALL_TRAINING, resolved_from

    params = OPTIMIZER | arguments_of("ZeroOneAdam", 1) | {"local_step_scaler": 1, "local_step_clipper": 8}
    settings = SMALL_TRAINING | {
        "data_path": data_path,
        "split": "80,10,10",
        "eval_interval": 100,
        "eval_iters": 1,
        "eval_data": f"{folder}/texts.jsonl",
        "optimizer": {"type": "ZeroOneAdam", "params": params},
        "log_interval": 1,
    }
    for end in (8, 11):
        save = {"save": f"{folder}/{end}", "save_interval": 100, "train_iters": end}
        again = {"load": f"{folder}/{end}", "no_load_optim": True, "train_iters": end}
        for name, changes in {"trained": save, "again": again}.items():
            changes |= {"log_dir": f"{folder}/{end}-{name}"}
            resolved = resolved_from(settings | changes, devices=2)
            train_in(create_groups(1, 1), resolved)


def last_evaluation(folder: Path) -> dict[str, float]:
    """Return the metrics of the last iteration's evaluations."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics: dict[str, float] = {}
    for line in (each for each in lines if "event" not in each):
        metrics |= {name: value for name, value in line.items() if name.startswith(("loss/", "perplexity"))}
    metrics.pop("loss/train", None)
    return metrics


@pytest.mark.slow
def test_an_evaluation_among_local_steps_is_that_of_the_checkpoint(tmp_path):
    """Update 8 synchronizes; 9 to 11 are local steps, whose weights differ between replicas."""
    (tmp_path / "texts.jsonl").write_text('{"text": "abcdefghijklmnopqrstuvwxyz"}\n' * 3)
    run_ranks(train_to_its_end, size=2, folder=str(tmp_path), data_path=write_corpus(tmp_path))
    evaluations = {}
    for end in (8, 11):
        trained, again = (last_evaluation(tmp_path / f"{end}-{name}") for name in ("trained", "again"))
        assert trained == again
        assert {"loss/validation", "loss/test"} < set(trained)
        evaluations[end] = trained
    assert evaluations[8] != evaluations[11]
