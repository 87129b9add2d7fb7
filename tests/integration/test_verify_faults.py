"""Faults planted in a resumed run, or in the checkpoint that it resumes from: each is named.

One process trains without interruption and up to the interruption; then every fault gets a resumed run,
and the comparison must name what was planted.
"""

import itertools
import logging
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from neox_config.errors import NeoXError
from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.verify_resume.phases import Phase, phases_of
from neox_model.checkpoint import load, logical, rng_state, shards
from neox_model.checkpoint.contents import Manifest
from neox_model.engine.updater import Updater
from neox_model.train import open_run
from neox_model.train.data.batch import Batch
from neox_model.train.loop import Loop
from neox_model.train.step import EngineStep
from neox_model.verify.run import compare
from support.checkpoint_edits import edit_manifest, edit_tensors
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.resumes import SPAN, carry_out, comparison_of, plan_from
from support.settings import SMALL_TRAINING

pytestmark = pytest.mark.slow

SETTINGS = SMALL_TRAINING | {
    "train_iters": 20,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1}},
    "warmup": 0.5,
}
WEIGHT = "layers.0.mlp.up.weight"
NO_FAULT = "no fault"

Plant = Callable[[Path], Any]
PLANTS: dict[str, Plant] = {}
NAMED: dict[str, str] = {NO_FAULT: "^$"}
BASES: dict[str, str] = {}


def plant(fault: str, named: str, base: str = "fp32") -> Callable[[Plant], Plant]:
    """Register a fault: what the first difference must say, and the precision that it is planted in."""

    def register(function: Plant) -> Plant:
        PLANTS[fault], NAMED[fault], BASES[fault] = function, named, base
        return function

    return register


# What is read


@contextmanager
def batches(change: Callable[[Iterator[Batch]], Iterator[Batch]]) -> Iterator[None]:
    """Change the stream of micro-batches that the trainer gets."""
    with patch.object(open_run, "Loop", lambda run, stream: Loop(run, change(iter(stream)))):
        yield


@plant(
    "a batch is skipped",
    "data: sample 8 of iteration 3: sample 12 of iteration 4 was read instead",
)
def skipped_batch(folder):
    return batches(lambda stream: itertools.islice(stream, 2, None))


@plant(
    "a batch is repeated",
    "data: sample 12 of iteration 4: sample 8 of iteration 3 was read instead",
)
def repeated_batch(folder):
    def change(stream):
        first = list(itertools.islice(stream, 2))
        return itertools.chain(first, first, stream)

    return batches(change)


@plant(
    "two samples are read in another order",
    "data: sample 8 of iteration 3: sample 9 of iteration 3 was read instead",
)
def flipped_rows(folder):
    def flipped(batch):
        return Batch(*(None if part is None else part.flip(0) for part in batch))

    return batches(lambda stream: map(flipped, stream))


@plant("the data of another seed is read", "data: sample 8 of iteration 3: other tokens were read")
def another_seed(folder):
    build = open_run.build_datasets

    def built(resolved, **options):
        training = resolved.config.training.replaced(seed=99)
        return build(resolved.replaced(training=training), **options)

    return patch.object(open_run, "build_datasets", built)


@plant(
    "one label is another token",
    "data: sample 11 of iteration 3: other tokens were read, which .* in no iteration",
)
def changed_label(folder):
    def change(stream):
        for number, batch in enumerate(stream):
            if number == 1:
                batch.labels_BS[1, 5] += 1
            yield batch

    return batches(change)


@plant("micro-batches are accumulated once", "data: iteration 3 read 2 samples instead of 4")
def lost_accumulation(folder):
    built = EngineStep.__init__

    def build(step, engine, **options):
        built(step, engine, **{**options, "accumulation": 1})
        engine._accumulation = 1

    return patch.object(EngineStep, "__init__", build)


# Random streams


@contextmanager
def after_restoring(change: Callable[[], object]) -> Iterator[None]:
    restore = rng_state.restore

    def restored(states):
        restore(states)
        change()

    with patch.object(rng_state, "restore", restored):
        yield


@plant("a stale state of python's generator", "random stream python of rank 0 after loading")
def stale_python(folder):
    return after_restoring(lambda: random.seed(1))


@plant("a stale state of numpy's generator", "random stream numpy of rank 0 after loading")
def stale_numpy(folder):
    return after_restoring(lambda: np.random.seed(1))


@plant("a stale state of torch's generator", "random stream torch of rank 0 after loading")
def stale_torch(folder):
    return after_restoring(lambda: torch.manual_seed(1))


@plant("dropout gets another seed", "random stream torch of rank 0 at the start of iteration 3")
def dropout_seed(folder):
    def change(stream):
        torch.manual_seed(1)
        yield from stream

    return batches(change)


@plant("an iteration draws once more", "random stream torch of rank 0 after iteration 3")
def drawn_once_more(folder):
    step = EngineStep.__call__

    def stepped(self, stream):
        report = step(self, stream)
        torch.rand(1)
        return report

    return patch.object(EngineStep, "__call__", stepped)


# Tensors


def edited(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Any:
    edit_tensors(folder, change)
    return nullcontext()


@plant(
    "a moment is dropped",
    f"restored optimizer state {WEIGHT}/exp_avg at iteration 2: 1,024 of 1,024 elements differ",
)
def dropped_moment(folder):
    return edited(folder, lambda tensors: tensors[f"{WEIGHT}/exp_avg"].zero_())


@plant(
    "the moments are swapped",
    f"restored optimizer state {WEIGHT}/exp_avg at iteration 2: .* elements differ",
)
def swapped_moments(folder):
    def change(tensors):
        one, other = f"{WEIGHT}/exp_avg", f"{WEIGHT}/exp_avg_sq"
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return edited(folder, change)


@plant(
    "two tensors of equal size are swapped",
    f"restored weight {WEIGHT} at iteration 2: .* elements differ",
)
def swapped_weights(folder):
    def change(tensors):
        other = WEIGHT.replace(".0.", ".1.")
        tensors[WEIGHT], tensors[other] = tensors[other], tensors[WEIGHT]

    return edited(folder, change)


@plant("a weight is not restored", f"restored weight {WEIGHT} at iteration 2: 1,0.. of 1,024 elements differ")
def stale_weight(folder):
    fill = shards.ShardReader.fill

    def filled(self, target, name, *args):
        if name != WEIGHT:
            fill(self, target, name, *args)

    return patch.object(shards.ShardReader, "fill", filled)


@plant(
    "a weight is rounded to 16 bit",
    f"restored weight {WEIGHT} at iteration 2: .* elements differ",
)
def rounded_weight(folder):
    return edited(folder, lambda tensors: tensors[WEIGHT].copy_(tensors[WEIGHT].bfloat16()))


@plant(
    "one element is off by one unit in the last place",
    f"restored weight {WEIGHT} at iteration 2: 1 of 1,024 elements differ, by at most 1 ulp,",
)
def one_ulp(folder):
    def change(tensors):
        weight = tensors[WEIGHT]
        weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(torch.inf))

    return edited(folder, change)


@plant(
    "the 16-bit weights are stale",
    "embedding.position_embeddings.weight in the model of rank 0 is not what the uninterrupted .* held",
    base="bf16",
)
def stale_copies(folder):
    return patch.object(Updater, "to_model", lambda update: None)


# Numbers


def with_numbers(folder: Path, part: str, **values: Any) -> Any:
    edit_manifest(folder, part, values)
    return nullcontext()


@plant("the schedule is one update ahead", "counter schedule.applied_updates at iteration 2: 3 instead of 2")
def schedule_ahead(folder):
    return with_numbers(folder, "schedule", applied_updates=3)


@plant("another learning rate", "counter schedule.curve.peak at iteration 2: 0.02 instead of 0.01")
def learning_rate(folder):
    chosen = load._chosen_curve
    return patch.object(load, "_chosen_curve", lambda *given: replace(chosen(*given), peak=0.02))


@plant(
    "Adam's count of updates is one too high", f"optimizer state {WEIGHT}/step at iteration 2: 3 instead of 2"
)
def count_of_updates(folder):
    numbers = Manifest.read(folder).optimizer_scalars[WEIGHT]
    return with_numbers(
        folder, "optimizer_scalars", **{WEIGHT: {**numbers, "step": {**numbers["step"], "value": 3.0}}}
    )


@plant("a counter of the loop", "counter training.tokens at iteration 2: 129 instead of 128")
def count_of_tokens(folder):
    return with_numbers(folder, "training", tokens=129)


@plant(
    "the loss scale starts anew",
    "counter engine.cur_scale at iteration 2: 65536 instead of ",
    base="fp16",
)
def loss_scale(folder):
    return with_numbers(folder, "engine", cur_scale=65536.0)


@plant(
    "another weight decay",
    "optimizer setting weight_decay of parameter group 0 on rank 0 after loading: 0.2 instead of 0.1",
)
def weight_decay(folder):
    return optimizer_setting("weight_decay", 0.2)


@plant(
    "other betas",
    r"optimizer setting betas of parameter group 0 on rank 0 after loading: \[0.5, 0.999\] instead of",
)
def betas(folder):
    return optimizer_setting("betas", (0.5, 0.999))


def optimizer_setting(name: str, value: Any) -> Any:
    build = open_run.build_optimizer

    def built(*args, **options):
        optimizer = build(*args, **options)
        optimizer.param_groups[0][name] = value
        return optimizer

    return patch.object(open_run, "build_optimizer", built)


@plant("gradients are summed, not averaged", r"gradient norm of iteration 3: .* \(5.0e-01 relative\)")
def doubled_gradients(folder):
    build = open_run.build_engine

    def built(run_spec, update, model, *args, **options):
        engine = build(run_spec, update, model, *args, **options)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)
        return engine

    return patch.object(open_run, "build_engine", built)


@plant(
    "gradients are clipped elsewhere",
    r"weight embedding.position_embeddings.weight of rank 0 after the update of iteration 3: its sum is",
)
def clipping(folder):
    build = open_run.build_engine

    def built(*args, **options):
        engine = build(*args, **options)
        engine.update.mixed._max_norm = 1e-8
        return engine

    return patch.object(open_run, "build_engine", built)


# The tests


def plan_of(folder: Path, precision: str) -> LaunchPlan:
    values = {**SETTINGS, "data_path": str(folder / "corpus"), "precision": precision}
    if precision == "fp16":
        values["fp16"] = {"initial_scale_power": 4, "loss_scale_window": 2}
    return plan_from(folder / f"{precision}.yml", values)


def recorded_phases(plan: LaunchPlan, folder: Path) -> list[Phase]:
    return list(phases_of(plan, plan, span=SPAN, source=None, folder=folder, evaluates=False))


def first_difference(base: Path, own: Path) -> str:
    return compare(comparison_of(base, own, samples=4)).first


def find_all(folder: str) -> dict[str, str]:
    """In one process: fault to the first difference that the comparison names."""
    where = Path(folder)
    write_corpus(where)
    found = {}
    for precision in ("fp32", "bf16", "fp16"):
        plan, base = plan_of(where, precision), where / precision
        for phase in recorded_phases(plan, base)[:2]:
            carry_out(phase)
        faults = [fault for fault, its in BASES.items() if its == precision]
        for number, fault in enumerate([NO_FAULT, *faults]):
            own = where / f"{precision}-{number}"
            shutil.copytree(base / "interrupted", own / "interrupted")
            checkpoint = own / "interrupted" / "checkpoints" / f"global_step{SPAN.middle}"
            with PLANTS[fault](checkpoint) if fault != NO_FAULT else nullcontext():
                try:
                    carry_out(recorded_phases(plan, own)[2])
                except NeoXError as error:
                    # Some faults end the run: what it restored is compared all the same.
                    logging.getLogger(__name__).warning("%s: %s", fault, error)
            first = first_difference(base, own)
            found[fault if fault != NO_FAULT else f"{NO_FAULT} in {precision}"] = first
    found["every save rounds"] = find_rounded_saves(where)
    return found


def find_rounded_saves(where: Path) -> str:
    """All checkpoints of all runs are rounded: only the memory of the ranks shows it."""
    plan, base = plan_of(where, "fp32"), where / "rounded"
    part = logical.Fragment.as_part

    def rounded(fragment, name, values):
        whole = part(fragment, name, values)
        return replace(whole, values=whole.values.bfloat16().float()) if name == fragment.name else whole

    with patch.object(logical.Fragment, "as_part", rounded):
        for phase in recorded_phases(plan, base):
            carry_out(phase)
    return first_difference(base, base)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("faults")
    return run_ranks(find_all, size=1, timeout_seconds=1800, folder=str(folder))[0]


@pytest.mark.parametrize("fault", PLANTS)
def test_a_planted_fault_is_named(found, fault):
    assert re.search(NAMED[fault], found[fault]), found[fault]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_without_a_fault_everything_agrees(found, precision):
    assert found[f"{NO_FAULT} in {precision}"] == ""


def test_a_save_that_always_rounds_is_found_in_the_memory_of_the_ranks(found):
    assert re.search("in the optimizer of rank 0 is not what the uninterrupted", found["every save rounds"])


def test_there_are_twenty_faults_and_more():
    assert len(PLANTS) >= 20
