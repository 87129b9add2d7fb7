"""deterministic: what it sets, and that a program's own setting survives."""

import os

import pytest
import torch

from neox_model.api.alone import OwnState
from neox_model.train.determinism import use_deterministic_algorithms
from support.refusals import refused
from support.settings import resolved_from


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.set_deterministic_debug_mode(0)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_an_operator_without_a_deterministic_algorithm_is_an_error():
    use_deterministic_algorithms(resolved_from({"deterministic": True}).config.training, compiles=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.utils.deterministic.fill_uninitialized_memory
    with refused(RuntimeError, "a deterministic implementation"):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))


def test_nothing_is_set_by_default():
    use_deterministic_algorithms(resolved_from({}).config.training, compiles=True)
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_a_program_and_its_training_keep_their_own_settings():
    own = OwnState()
    torch.set_deterministic_debug_mode("warn")
    with own.exchanged():
        assert torch.get_deterministic_debug_mode() == 0
        use_deterministic_algorithms(resolved_from({"deterministic": True}).config.training, compiles=True)
        with own.exchanged():
            assert torch.get_deterministic_debug_mode() == 1
        assert torch.get_deterministic_debug_mode() == 2
    assert torch.get_deterministic_debug_mode() == 1
