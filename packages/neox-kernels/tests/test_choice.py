import dataclasses
import logging
from pathlib import Path

import pytest
import torch

from neox_kernels import Availability, KernelUnavailable, bias_gelu, choice, choose
from neox_kernels.status import OPERATORS
from support.refusals import refused, shows


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("NEOX_KERNELS_CACHE", str(tmp_path / "cache"))
    choice._log_once.cache_clear()
    choice._verdict.cache_clear()
    return tmp_path / "cache"


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
    assert shows(caplog.messages, "bias_gelu: fused", "torch.float32 on cpu")


def test_true_raises_with_the_reason_if_fused_is_unavailable(unavailable):
    with refused(KernelUnavailable, "bias_gelu"):
        choose(True, unavailable, device="cpu", dtype=torch.float32)


def test_auto_falls_back_and_logs_the_reason(unavailable, caplog):
    with caplog.at_level(logging.INFO):
        assert choose("auto", unavailable, device="cpu", dtype=torch.float32) is unavailable.reference
    assert shows(caplog.messages, "bias_gelu: reference", "no compiler")


def test_auto_selects_fused_if_it_agrees_and_is_faster(available, monkeypatch, caplog):
    monkeypatch.setattr(choice, "time_forms", lambda operator, args: (1.0, 2.0))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            chosen = choose("auto", available, device="cpu", dtype=torch.float32, shape=(4, 6))
            assert chosen == available.fused_in_eager
    assert shows(caplog.messages, "fused 1.000 ms", "reference 2.000 ms", "(4, 6), torch.float32")


def test_auto_selects_the_reference_if_faster(available, monkeypatch):
    monkeypatch.setattr(choice, "time_forms", lambda operator, args: (2.0, 1.0))
    assert choose("auto", available, device="cpu", dtype=torch.float32, shape=(4, 6)) is available.reference


def test_auto_selects_the_reference_if_fused_is_wrong(available, caplog):
    wrong = dataclasses.replace(available, fused=lambda x, bias: bias_gelu(x, bias) * 1.01)
    with caplog.at_level(logging.INFO):
        assert choose("auto", wrong, device="cpu", dtype=torch.float32, shape=(4, 6)) is wrong.reference
    assert shows(caplog.text, "0 differs", "0.01")


def test_auto_agrees_with_the_other_ranks(available, monkeypatch):
    monkeypatch.setattr(choice, "time_forms", lambda operator, args: (1.0, 2.0))
    answers = []

    def agree(mine):
        answers.append(mine)
        return False

    arguments = {"device": "cpu", "dtype": torch.float32, "shape": (4, 6), "agree": agree}
    assert choose("auto", available, **arguments) is available.reference
    assert answers == [True]


def test_auto_without_a_shape_raises(available):
    with refused(ValueError, "requires the shape"):
        choose("auto", available, device="cpu", dtype=torch.float32)


def test_fused_operators_are_unavailable_on_a_cpu():
    available = bias_gelu.available(device="cpu", dtype=torch.float32)
    assert not available.ok
    assert "'cpu'" in available.reason


def test_unsupported_dtype_is_named_in_the_reason():
    available = bias_gelu.available(device="cuda", dtype=torch.float64)
    assert "not torch.float64" in available.reason


def test_both_forms_are_timed(available, monkeypatch):
    monkeypatch.setattr(choice, "graph_ms", lambda run: 1.0 if run.args[0] is available.fused else 3.0)
    assert choice.time_forms(available, ()) == (1.0, 3.0)


def test_auto_selects_the_reference_if_the_trial_fails(available, monkeypatch, caplog):
    def fail(operator, args):
        raise torch.OutOfMemoryError("CUDA out of memory\nmore")

    monkeypatch.setattr(choice, "time_forms", fail)
    with caplog.at_level(logging.INFO):
        chosen = choose("auto", available, device="cpu", dtype=torch.float32, shape=(4, 6))
    assert chosen is available.reference
    assert shows(caplog.messages, "bias_gelu", "CUDA")


def test_the_example_of_a_run_is_tried(available, monkeypatch):
    tried = []

    def timed(operator, args):
        tried.append(args[0].shape)
        return (1.0, 2.0)

    monkeypatch.setattr(choice, "time_forms", timed)
    choose(
        "auto",
        available,
        device="cpu",
        dtype=torch.float32,
        shape=(4, 6),
        example=lambda shape, dtype, device: bias_gelu.example((2, *shape), dtype, device),
    )
    assert tried == [(2, 4, 6)]


def test_a_decision_is_stored_for_its_arguments_and_survives_the_process(available, monkeypatch, caplog):
    times = iter([(1.0, 2.0), (2.0, 1.0)])

    def timed(operator, args):
        return next(times)

    monkeypatch.setattr(choice, "time_forms", timed)
    arguments = {"device": "cpu", "dtype": torch.float32}
    assert choose("auto", available, **arguments, shape=(4, 6)) == available.fused_in_eager
    # As in another process, in which a trial would decide otherwise.
    choice._verdict.cache_clear()
    with caplog.at_level(logging.INFO):
        assert choose("auto", available, **arguments, shape=(4, 6)) == available.fused_in_eager
    assert shows(caplog.messages, "fused 1.000 ms", "reference 2.000 ms", "(4, 6)", "(stored)")
    assert choose("auto", available, **arguments, shape=(4, 7)) is available.reference


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_the_key_of_a_decision_is_that_of_real_tensors(operator):
    """It is made with tensors without memory."""
    keys = [
        choice._key_of(
            operator,
            torch.device("cpu"),
            operator.example((4, 2, 3, 8), torch.float32, torch.device(made_on)),
        )
        for made_on in ("cpu", "meta")
    ]
    assert keys[0] == keys[1]


def test_a_damaged_decision_is_made_again(available, monkeypatch, cache):
    monkeypatch.setattr(choice, "time_forms", lambda *_: (1.0, 2.0))
    arguments = {"device": "cpu", "dtype": torch.float32, "shape": (4, 6)}
    choose("auto", available, **arguments)
    (path,) = (cache / "decisions").iterdir()
    whole = path.read_text()
    path.write_text(whole[:20])
    choice._verdict.cache_clear()
    assert choose("auto", available, **arguments) == available.fused_in_eager
    assert path.read_text() == whole


def test_decisions_that_others_could_change_are_not_read(available, monkeypatch, cache):
    monkeypatch.setattr(choice, "time_forms", lambda *_: (1.0, 2.0))
    cache.mkdir()
    cache.chmod(0o777)
    assert choose("auto", available, device="cpu", dtype=torch.float32, shape=(4, 6)) == (
        available.fused_in_eager
    )
    assert not list(cache.iterdir())


def test_a_full_disk_does_not_end_a_training(available, monkeypatch, cache, caplog):
    def fail(path, *arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(choice, "time_forms", lambda *_: (1.0, 2.0))
    monkeypatch.setattr(Path, "write_text", fail)
    assert choose("auto", available, device="cpu", dtype=torch.float32, shape=(4, 6)) == (
        available.fused_in_eager
    )
    assert "is not stored" in caplog.text
    assert "No space left" in caplog.text
    assert not list((cache / "decisions").iterdir())


def test_layers_under_the_compiler_call_the_reference(available):
    called = []
    operator = dataclasses.replace(
        available, fused=lambda x, bias: called.append("fused") or bias_gelu(x, bias)
    )
    x, bias = torch.randn(4, 6), torch.randn(6)
    expected = operator.fused_in_eager(x, bias)
    assert called == ["fused"]
    compiled = torch.compile(operator.fused_in_eager, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, bias), expected)
    assert called == ["fused"]
