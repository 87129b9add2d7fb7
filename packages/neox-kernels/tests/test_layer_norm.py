import sys

import pytest
import torch

from neox_kernels import KernelUnavailable, add_layer_norm, apex_layer_norm, choose, layer_norm
from support.refusals import refused, shows

TOLERANCE = {torch.float64: 1e-11, torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def exact(x, weight, bias, epsilon):
    rows = []
    for row in x.double().reshape(-1, x.shape[-1]):
        distance = row - row.mean()
        normal = distance / (distance.square().mean() + epsilon).sqrt()
        rows.append(normal * weight.double() + bias.double())
    return torch.stack(rows).reshape(x.shape)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 3, 7, 127, 1025, 5000])
def test_layer_norm_equals_its_definition(width, dtype, form):
    x = torch.randn(2, 2, width, dtype=torch.float64).mul(3).add(1).to(dtype)
    weight, bias = torch.randn(2, width, dtype=torch.float64).to(dtype)
    result = form(layer_norm)(x, weight, bias, 1e-5)
    assert result.dtype == dtype
    expected = exact(x, weight, bias, 1e-5)
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_large_mean_loses_no_precision(form):
    x = torch.randn(3, 256) + 1000
    result = form(layer_norm)(x, torch.ones(256), torch.zeros(256))
    torch.testing.assert_close(
        result.double(), exact(x, torch.ones(256), torch.zeros(256), 1e-5), atol=2e-4, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 65])
def test_parameters_may_be_float32(width, dtype, form):
    x = torch.randn(4, width).to(dtype).requires_grad_()
    weight, bias = torch.randn(width, requires_grad=True), torch.randn(width, requires_grad=True)
    result = form(layer_norm)(x, weight, bias)
    assert result.dtype == dtype
    torch.testing.assert_close(
        result.detach().double(),
        exact(x.detach(), weight.detach(), bias.detach(), 1e-5),
        atol=2e-2,
        rtol=2e-2,
    )
    result.float().square().sum().backward()
    assert weight.grad.dtype == torch.float32
    assert x.grad.dtype == dtype


@pytest.mark.parametrize("form", ["reference", "custom"], indirect=True)
def test_layer_norm_gradients(form):
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(form(layer_norm), (x, weight, bias))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 7, 1025])
def test_norm_of_a_sum_equals_its_definition(width, dtype, form):
    x, residual = torch.randn(2, 2, 3, width, dtype=torch.float64).mul(3).to(dtype)
    weight, bias = torch.randn(2, width, dtype=torch.float64).to(dtype)
    total, result = form(add_layer_norm)(x, residual, weight, bias, 1e-5)
    assert torch.equal(total, x + residual)
    assert result.dtype == dtype
    expected = exact(total, weight, bias, 1e-5)
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("form", ["reference", "custom"], indirect=True)
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["sum", "normalized sum", "both"])
def test_gradients_of_the_norm_of_a_sum(form, used):
    sizes = ((2, 3, 5), (2, 3, 5), 5, 5)
    tensors = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    assert torch.autograd.gradcheck(
        lambda *given: tuple(form(add_layer_norm)(*given)[place] for place in used), tensors
    )


def test_a_residual_of_another_shape_is_refused():
    with refused(ValueError, "(2, 4)", "(1, 4)"):
        add_layer_norm.fused(torch.zeros(2, 4), torch.zeros(1, 4), torch.zeros(4), torch.zeros(4))


def test_missing_apex_is_reported_with_the_remedy():
    with refused(KernelUnavailable, "NVIDIA GPU"):
        choose(True, apex_layer_norm, device="cpu", dtype=torch.float32)
    with refused(KernelUnavailable, "APEX_CUDA_EXT=1"):
        choose(True, apex_layer_norm, device="cuda", dtype=torch.float32)
    assert choose("auto", apex_layer_norm, device="cuda", dtype=torch.float32) is layer_norm.reference


@pytest.fixture
def apex_folder(tmp_path, monkeypatch):
    """Return a folder for a fake `apex`, with a fake of NVIDIA's extension; undo the imports afterwards."""
    (tmp_path / "fused_layer_norm_cuda.py").touch()
    folder = tmp_path / "apex"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in ("apex", "apex.normalization", "apex.normalization.fused_layer_norm"):
        sys.modules.pop(name, None)


def test_different_package_named_apex_is_rejected(apex_folder):
    availability = apex_layer_norm.available(device="cuda", dtype=torch.float32)
    assert not availability.ok
    assert shows(availability.reason, "'apex.normalization'", "PyPI")


def test_nvidia_apex_is_found_and_called(apex_folder):
    package = apex_folder / "normalization"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "fused_layer_norm.py").write_text(
        "def fused_layer_norm_affine(x, weight, bias, shape, eps):\n"
        "    return x * weight + bias * shape[0] + eps\n"
    )
    assert apex_layer_norm.available(device="cuda", dtype=torch.float32).ok
    given = apex_layer_norm.fused(torch.full((2, 3), 2.0), torch.full((3,), 5.0), torch.ones(3), 0.5)
    torch.testing.assert_close(given, torch.full((2, 3), 13.5))
