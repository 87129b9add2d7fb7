import dataclasses
import logging

import pytest
import torch

from neox_kernels import Availability, KernelUnavailable, bias_gelu, choice, choose, trial


@pytest.fixture(autouse=True)
def fresh():
    choice._log_once.cache_clear()
    choice._verdict.cache_clear()


@pytest.fixture
def unavailable():
    return dataclasses.replace(
        bias_gelu, availability=lambda device, dtype, *, may_build: Availability(False, "no compiler")
    )


@pytest.fixture
def available():
    return dataclasses.replace(
        bias_gelu,
        fused=lambda x, bias, form="tanh": bias_gelu(x, bias, form),
        availability=lambda device, dtype, *, may_build: Availability(True, f"{dtype} on {device.type}"),
    )


def test_false_selects_the_reference_even_if_fused_is_available(available):
    assert choose(False, available, device="cpu", dtype=torch.float32) is available.reference


def test_true_selects_the_fused_implementation_if_available(available, caplog):
    with caplog.at_level(logging.INFO):
        assert choose(True, available, device="cpu", dtype=torch.float32) is available.fused
    assert caplog.messages == ["bias_gelu: fused (torch.float32 on cpu)"]


def test_true_raises_with_the_reason_if_fused_is_unavailable(unavailable):
    with pytest.raises(
        KernelUnavailable, match=r"bias_gelu is required and unavailable: no compiler; set it to"
    ):
        choose(True, unavailable, device="cpu", dtype=torch.float32)


def test_auto_falls_back_and_logs_the_reason(unavailable, caplog):
    with caplog.at_level(logging.INFO):
        assert choose("auto", unavailable, device="cpu", dtype=torch.float32) is unavailable.reference
    assert caplog.messages == ["bias_gelu: reference implementation: no compiler"]


def test_auto_selects_fused_if_it_agrees_and_is_faster(available, monkeypatch, caplog):
    monkeypatch.setattr(
        trial, "time_forms", lambda operator, args: trial.Timing(fused_ms=1.0, compiled_ms=2.0)
    )
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            chosen = choose("auto", available, device="cpu", dtype=torch.float32, shape=(4, 6))
            assert chosen is available.fused
    assert caplog.messages == [
        "bias_gelu: fused 1.000 ms, torch.compile of the reference 2.000 ms, (4, 6), torch.float32"
    ]


def test_auto_selects_the_reference_if_faster(available, monkeypatch):
    monkeypatch.setattr(
        trial, "time_forms", lambda operator, args: trial.Timing(fused_ms=2.0, compiled_ms=1.0)
    )
    assert choose("auto", available, device="cpu", dtype=torch.float32, shape=(4, 6)) is available.reference


def test_auto_selects_the_reference_if_fused_is_wrong(available, caplog):
    wrong = dataclasses.replace(available, fused=lambda x, bias: bias_gelu(x, bias) * 1.01)
    with caplog.at_level(logging.INFO):
        assert choose("auto", wrong, device="cpu", dtype=torch.float32, shape=(4, 6)) is wrong.reference
    assert "result 0 differs from the reference by 0.01" in caplog.text


def test_auto_agrees_with_the_other_ranks(available, monkeypatch):
    monkeypatch.setattr(
        trial, "time_forms", lambda operator, args: trial.Timing(fused_ms=1.0, compiled_ms=2.0)
    )
    answers = []

    def agree(mine):
        answers.append(mine)
        return False

    arguments = {"device": "cpu", "dtype": torch.float32, "shape": (4, 6), "agree": agree}
    assert choose("auto", available, **arguments) is available.reference
    assert answers == [True]


def test_auto_without_a_shape_raises(available):
    with pytest.raises(ValueError, match="requires the shape"):
        choose("auto", available, device="cpu", dtype=torch.float32)


def test_fused_operators_are_unavailable_on_a_cpu():
    available = bias_gelu.available(device="cpu", dtype=torch.float32)
    assert not available.ok
    assert available.reason == "the fused operators require an NVIDIA GPU, and the tensors are on 'cpu'"


def test_unsupported_dtype_is_named_in_the_reason():
    available = bias_gelu.available(device="cuda", dtype=torch.float64)
    assert "not torch.float64" in available.reason


def test_eager_is_timed_if_torch_compile_fails(available, monkeypatch, caplog):
    def measure(run):
        function = run.args[0]
        if getattr(function, "fails", False):
            raise RuntimeError("no C compiler\nmore")
        return 1.0 if function is available.fused else 3.0

    def compiled(x, bias):
        raise AssertionError("not called")

    compiled.fails = True
    monkeypatch.setattr(trial, "median_ms", measure)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiled)
    assert trial.time_forms(available, ()) == trial.Timing(fused_ms=1.0, compiled_ms=3.0)
    assert caplog.messages == [
        "torch.compile of the reference bias_gelu failed (no C compiler); timing PyTorch eager instead"
    ]
