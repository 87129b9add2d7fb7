"""Resuming on the same layout and on others: what agrees, how closely, and a tied copy out of step."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed

from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.protocol.verification import Answer
from neox_launcher.verify_resume.phases import phases_of
from neox_model.engine.deepspeed.engines import PipelineEngine
from neox_model.engine.torch_pipeline import TorchPipelineEngine
from neox_model.parallel.logical import named_logical_parameters
from neox_model.verify.run import compare
from support.corpus import write_corpus
from support.distributed import run_ranks
from support.refusals import shows
from support.resumes import SPAN, carry_out, comparison_of, plan_from
from support.settings import SMALL_TRAINING

pytestmark = pytest.mark.slow

SETTINGS = SMALL_TRAINING | {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "train_iters": 20,
    "train_batch_size": 8,
    "num_gpus": 2,
}
WITH_DROPOUT = {"hidden_dropout": 0.1, "zero_optimization": {"stage": 1}}
# Uninterrupted, resumed, and the parameters that differ.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ZeRO 1, dropout": (WITH_DROPOUT, WITH_DROPOUT),
    "ZeRO 1 to plain": ({"zero_optimization": {"stage": 1}}, {}),
    "tensor 2 to data 2": ({"model_parallel_size": 2}, {}),
    "data 2 to pipeline 2": ({}, {"pipe_parallel_size": 2}),
    "pipeline 2 to torch pipeline 2": (
        {"pipe_parallel_size": 2, "engine": "deepspeed"},
        {"pipe_parallel_size": 2, "engine": "torch"},
    ),
    "torch pipeline 2 to pipeline 2": (
        {"pipe_parallel_size": 2, "engine": "torch"},
        {"pipe_parallel_size": 2, "engine": "deepspeed"},
    ),
    "bf16, ZeRO 2 to tensor 2": (
        {"precision": "bfloat16", "zero_optimization": {"stage": 2}},
        {"precision": "bfloat16", "model_parallel_size": 2},
    ),
}
# The same of optimizers whose states or updates are of a kind that the others' are not.
OPTIMIZERS = {
    f"{kind}, {precision}": (
        {"model_parallel_size": 2, "optimizer": {"type": kind, "params": {"lr": 0.003}}, **settings},
        {"optimizer": {"type": kind, "params": {"lr": 0.003}}, **settings},
    )
    for kind in ("Lamb", "Lion", "Muon", "SM3")
    for precision, settings in (("fp32", {}), ("bf16", {"precision": "bfloat16"}))
}
TIED = {"pipe_parallel_size": 2, "no_weight_tying": False}
# The engine that loads a checkpoint into a pipeline, for each of the two.
ENGINES = {"deepspeed": PipelineEngine, "torch": TorchPipelineEngine}


def plan_of(folder: Path, name: str, settings: dict[str, Any]) -> LaunchPlan:
    values = {**SETTINGS, "data_path": str(folder / "corpus"), **settings}
    return plan_from(folder / f"{name}-{distributed.get_rank()}.yml", values)


def verify(where: Path, name: str, one: dict[str, Any], other: dict[str, Any]) -> Answer:
    """Run the same three runs and comparison as the command, in the existing processes."""
    plan, resumed = plan_of(where, "one", one), plan_of(where, "other", other)
    folder = where / name.replace(" ", "-").replace(",", "")
    options = {"span": SPAN, "source": None, "folder": folder, "evaluates": False}
    for phase in phases_of(plan, resumed, **options):
        carry_out(phase)
    first, second = plan.resolved.run, resumed.resolved.run
    sizes = (first.layout.tensor, first.layout.stages)
    return compare(
        comparison_of(
            folder,
            folder,
            samples=first.batch.whole,
            rounding=None if one == other else first.precision.weights,
            same_sizes=sizes == (second.layout.tensor, second.layout.stages),
        )
    )


@contextmanager
def untied_copy(kind: type[PipelineEngine | TorchPipelineEngine]) -> Iterator[None]:
    """After loading, the last stage computes with another copy of the tied embedding than the first."""
    load_state_dict = kind.load_state_dict

    def loaded(engine, state, **options):
        load_state_dict(engine, state, **options)
        for name, parameter in named_logical_parameters(engine.model):
            if name.startswith("embedding.word") and distributed.get_rank() == 1:
                with torch.no_grad():
                    parameter[0, 0] += 1.0

    with patch.object(kind, "load_state_dict", loaded):
        yield


def find_all(folder: str) -> dict[str, Any]:
    where = Path(folder)
    if distributed.get_rank() == 0:
        write_corpus(where)
    distributed.barrier()
    logging.disable(logging.WARNING)
    found = {name: verify(where, name, *case).as_facts() for name, case in CASES.items()}
    for engine, kind in ENGINES.items():
        settings = TIED | {"engine": engine}
        for state, fault in (("tied", nullcontext()), ("untied", untied_copy(kind))):
            name = f"{state}, {engine}"
            with fault:
                found[name] = verify(where, name, settings, settings).as_facts()
    return found


def find_optimizers(folder: str) -> dict[str, Any]:
    where = Path(folder)
    if distributed.get_rank() == 0:
        write_corpus(where)
    distributed.barrier()
    logging.disable(logging.WARNING)
    found = {}
    for name, (one, other) in OPTIMIZERS.items():
        found[f"{name}, same layout"] = verify(where, f"{name}, same", one, one).as_facts()
        # The sign of a gradient near zero is another one after rounding in bfloat16.
        if name != "Lion, bf16":
            found[name] = verify(where, name, one, other).as_facts()
    return found


@pytest.mark.sweep
def test_a_resumed_training_agrees_with_each_optimizer(tmp_path):
    answers = run_ranks(find_optimizers, size=2, timeout_seconds=1800, folder=str(tmp_path))[0]
    found = {name: Answer.from_facts(facts) for name, facts in answers.items()}
    assert len(found) == 2 * len(OPTIMIZERS) - 1
    assert {name: answer.first for name, answer in found.items() if answer.first} == {}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Answer]:
    folder = tmp_path_factory.mktemp("layouts")
    answers = run_ranks(find_all, size=2, timeout_seconds=1800, folder=str(folder))[0]
    return {name: Answer.from_facts(facts) for name, facts in answers.items()}


@pytest.mark.parametrize("case", [*CASES, *(f"tied, {engine}" for engine in ENGINES)])
def test_a_resumed_training_agrees(found, case):
    answer = found[case]
    assert answer.first == ""
    rows = {check.name: check for check in answer.checks}
    assert rows["data"].compared == "16 samples"
    assert rows["losses"].compared == "2 steps"
    assert rows["final weights"].compared == rows["restored weights"].compared


def test_on_the_same_layout_random_streams_and_memory_are_compared_and_elsewhere_they_are_not(found):
    same, other = (
        {check.name: check for check in found[case].checks}
        for case in ("ZeRO 1, dropout", "tensor 2 to data 2")
    )
    assert same["restored random streams"].compared == "10 streams"
    assert "restored memory of each rank" in same
    assert shows(other["restored random streams"].skipped, "start anew on")
    assert "restored memory of each rank" not in other


def test_on_another_layout_the_size_of_the_difference_is_shown(found):
    rows = {check.name: check for check in found["bf16, ZeRO 2 to tensor 2"].checks}
    assert rows["restored optimizer states"].worst == ""
    assert rows["final weights"].worst.endswith(" relative")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tied_copy_that_is_out_of_step_is_named(found, engine):
    answer = found[f"untied, {engine}"]
    place = "embedding.word_embeddings.weight in the optimizer of rank 1"
    assert shows(answer.first, f"{place} is not")
    copies = next(check for check in answer.checks if check.name == "copies of weights")
    assert copies.differing
