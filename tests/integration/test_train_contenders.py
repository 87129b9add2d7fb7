"""benchmarks/train_contenders.py: the plain model trains alike in all forms, and with parts of a batch."""

import importlib

import pytest
import torch
from torch import distributed

from neox_model.torch_compat import init_process_group
from support.sources import ROOT

SIZES = {"layers": 2, "hidden": 32, "heads": 4, "length": 12, "vocabulary": 512}


@pytest.fixture
def contenders(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("train_contenders")


@pytest.fixture
def one_rank():
    init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def losses(contenders, form, *, batch=2, accumulation=1, steps=4):
    """Train a Llama; return its losses."""
    plain_gpt = importlib.import_module("plain_gpt")
    torch.manual_seed(0)
    model = plain_gpt.PlainLlama(**SIZES, key_heads=2, width=48)
    job = contenders.Job(
        **SIZES, batch=batch, accumulation=accumulation, precision="fp32", device="cpu", steps=steps
    )
    step = contenders.plain_step(job, model, form)
    return [step().item() for _ in range(steps)]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_fully_sharded_layers_train_as_whole_ones(contenders, one_rank, accumulation):
    whole = losses(contenders, contenders.PLAIN_FORMS["plain"], accumulation=accumulation)
    sharded = losses(
        contenders,
        lambda model, precision: contenders.fully_sharded(model, precision, is_compiled=False),
        accumulation=accumulation,
    )
    assert sharded == pytest.approx(whole, rel=1e-6)
    # They differ by more than the tolerance: each update changes the model.
    assert len({round(loss, 3) for loss in whole}) == 4


@pytest.mark.slow
def test_compiled_and_sharded_layers_train_as_whole_ones(contenders, one_rank):
    whole = losses(contenders, contenders.PLAIN_FORMS["plain"])
    assert losses(contenders, contenders.PLAIN_FORMS["plain-fsdp2"]) == pytest.approx(whole, rel=1e-5)


def test_micro_batches_of_an_update_train_as_their_whole_batch(contenders):
    # Random tokens are drawn by rows, so three batches of one sample have the windows of one batch of three.
    plain = contenders.PLAIN_FORMS["plain"]
    parts = losses(contenders, plain, batch=1, accumulation=3)
    assert parts == pytest.approx(losses(contenders, plain, batch=3), rel=1e-6)


def test_the_operations_of_a_job_are_counted_by_both_conventions(contenders):
    train = importlib.import_module("train")
    sizes = {"layers": 24, "hidden": 2048, "heads": 16, "length": 2048, "batch": 8, "vocabulary": 50_304}
    job = contenders.Job(**sizes, precision="bf16", device="cuda", steps=1)
    matrices, attention = 24 * 12 * 2048**2 + 50_304 * 2048, 24 * 2048 * 2048
    assert train.operations_per_token(job) == [6 * (matrices + 2 * attention), 6 * (matrices + attention)]
