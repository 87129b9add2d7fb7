"""Too little memory for an evaluation has a remedy, for the weights and for the samples."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from neox_config.errors import NeoXError
from neox_model.evaluate import perplexity
from neox_model.parallel.groups import SINGLE_PROCESS
from support.refusals import shows
from support.settings import resolved_from


class Full:
    """An evaluation of both parts, of which the device cannot hold the activations."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def has(self, part: str) -> bool:
        return True

    def evaluate(self, part: str, first: int) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture
def alone(monkeypatch):
    """Replace what reads files and joins processes."""
    position = SimpleNamespace(from_state=lambda _: SimpleNamespace(validation_samples=0))
    monkeypatch.setattr(perplexity, "Position", position)
    monkeypatch.setattr(
        perplexity,
        "load_tokenizer",
        lambda _: SimpleNamespace(vocab_size=256, end_of_document=0, fingerprint="0"),
    )
    for name in (
        "find_storage",
        "folder_with_weights",
        "prepare_engine",
        "check_tokenizers",
        "build_datasets",
    ):
        monkeypatch.setattr(perplexity, name, lambda *_, **__: None)
    for name in ("read_training_state", "samples_of_objective", "open_streams", "character_count"):
        monkeypatch.setattr(perplexity, name, lambda *_, **__: None)


def refusal():
    with pytest.raises(NeoXError) as caught:
        perplexity.evaluate_parts(SINGLE_PROCESS, resolved_from({}), "checkpoints")
    return str(caught.value)


def test_too_little_memory_for_the_weights_asks_for_a_larger_device(monkeypatch, alone):
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(perplexity, "build_model", fail)
    assert shows(refusal(), "CUDA", "model-parallel-size")


def test_too_little_memory_for_the_samples_asks_for_smaller_micro_batches(monkeypatch, alone):
    for name in ("build_model", "recorded_values", "load_weights", "build_forward", "retrieval_loss"):
        monkeypatch.setattr(perplexity, name, Mock())
    monkeypatch.setattr(perplexity, "Evaluator", Full)
    assert shows(refusal(), "CUDA", "train-micro-batch-size-per-gpu", "model-parallel-size")
