import pytest
import torch

from neox_kernels import choice, rotary, rotary_, split_rotary
from support.refusals import refused

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def angles(sequence, pairs, dtype=torch.float32):
    frequencies = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / max(pairs, 1))
    turned = torch.arange(sequence, dtype=torch.float64)[:, None] * frequencies
    return turned.cos().to(dtype), turned.sin().to(dtype)


def exact(x_SBNK, cos, sin):
    """Rotate by multiplying complex numbers."""
    pairs = cos.shape[1]
    wide = x_SBNK.double()
    number = torch.complex(wide[..., :pairs].contiguous(), wide[..., pairs : 2 * pairs].contiguous())
    number = number * torch.complex(cos.double(), sin.double())[:, None, None, :]
    return torch.cat((number.real, number.imag, wide[..., 2 * pairs :]), dim=-1)


# Vectors of 1, 2, 4 and 8: (96, 12) is a quarter of a head of GPT-NeoX-20B.
SIZES = [(1, 1), (3, 1), (7, 3), (16, 8), (64, 16), (64, 32), (40, 8), (127, 60)]
SIZES += [(96, 12), (36, 2), (20, 10)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("width", "pairs"), SIZES[1:])
@pytest.mark.parametrize("operator", [rotary, rotary_], ids=["new", "in-place"])
def test_rotary_rotates_the_first_channels_of_queries_and_keys(operator, width, pairs, dtype, form):
    query = torch.randn(5, 2, 3, width, dtype=torch.float64).to(dtype)
    key = torch.randn(5, 2, 1, width, dtype=torch.float64).to(dtype)
    cos, sin = angles(5, pairs, torch.float64 if dtype == torch.float64 else torch.float32)
    expected = exact(query, cos, sin), exact(key, cos, sin)
    results = form(operator)(query.clone(), key.clone(), cos, sin)
    for result, value, given in zip(results, expected, (query, key), strict=True):
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), value, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert torch.equal(result[..., 2 * pairs :], given[..., 2 * pairs :])


@pytest.mark.parametrize("form", ["emulated"], indirect=True)
@pytest.mark.parametrize("operator", [rotary, rotary_], ids=["new", "in-place"])
@pytest.mark.parametrize("width", [64, 24, 20])
def test_heads_that_start_between_vectors(operator, width, form):
    """Strides, not sizes, decide the vectors; more positions than a thread has at once."""
    projection = torch.randn(19, 2, 3, 3 * width + 6, dtype=torch.bfloat16)
    cos, sin = angles(19, width // 4)
    query, key = projection[..., 2 : 2 + width], projection[..., 2 + width : 2 + 2 * width]
    expected = exact(query, cos, sin), exact(key, cos, sin)
    for result, value in zip(form(operator)(query, key, cos, sin), expected, strict=True):
        torch.testing.assert_close(result.double(), value, atol=2e-2, rtol=2e-2)


def test_zero_pairs_change_nothing(form):
    query, key = torch.randn(2, 3, 1, 2, 8)
    results = form(rotary)(query, key, torch.zeros(3, 0), torch.zeros(3, 0))
    assert torch.equal(results[0], query)
    assert torch.equal(results[1], key)


@pytest.mark.parametrize("form", ["custom", "emulated"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_rotary_changes_the_projection_of_its_slices(form, dtype):
    projection = torch.randn(4, 2, 3, 3, 16).to(dtype)
    before = projection.clone()
    query, key, value = projection.unbind(3)
    cos, sin = angles(4, 4)
    results = form(rotary_)(query, key, cos, sin)
    assert results[0].data_ptr() == query.data_ptr()
    assert results[1].data_ptr() == key.data_ptr()
    torch.testing.assert_close(query.double(), exact(before[:, :, :, 0], cos, sin), atol=2e-2, rtol=2e-2)
    assert torch.equal(value, before[:, :, :, 2])
    assert torch.equal(query[..., 8:], before[:, :, :, 0, 8:])


@pytest.mark.parametrize("form", ["reference", "custom"], indirect=True)
def test_rotary_gradients(form):
    query = torch.randn(3, 2, 2, 7, dtype=torch.float64, requires_grad=True)
    key = torch.randn(3, 2, 1, 7, dtype=torch.float64, requires_grad=True)
    cos, sin = angles(3, 2, torch.float64)
    assert torch.autograd.gradcheck(lambda query, key: form(rotary)(query, key, cos, sin), (query, key))


@pytest.mark.parametrize("form", ["custom", "emulated"], indirect=True)
def test_in_place_gradients_equal_out_of_place_gradients(form):
    weight = torch.randn(4, 2, 3, 48, requires_grad=True)
    cos, sin = angles(4, 6)

    def loss(operator):
        projection = weight * 1.0
        query, key = operator(projection[..., :16], projection[..., 16:32], cos, sin)
        return (query.sin() * key + projection[..., 32:]).square().sum()

    expected = torch.autograd.grad(loss(rotary.reference), weight)[0]
    torch.testing.assert_close(torch.autograd.grad(loss(form(rotary_)), weight)[0], expected)


def test_in_place_rotary_of_chunked_tensors_raises_in_backward():
    projection = torch.randn(4, 2, 3, 48, requires_grad=True) * 1.0
    query, key, value = projection.chunk(3, dim=-1)
    query, key = rotary_.fused(query, key, *angles(4, 6))
    with refused(RuntimeError, "modified inplace"):
        (query * key + value).sum()


def test_mismatched_shapes_are_refused():
    query = torch.zeros(3, 1, 2, 8)
    with refused(ValueError, "(3, 1, 2, 8)", "(3, 2, 2, 8)"):
        rotary.fused(query, torch.zeros(3, 2, 2, 8), *angles(3, 2))
    with refused(ValueError, "most 4 pairs"):
        rotary.fused(query, query, *angles(3, 5))
    with refused(ValueError, "the same dtype"):
        rotary.fused(query, query.half(), *angles(3, 2))


SPLITS = pytest.mark.parametrize("per_group", [1, 3])


@SPLITS
@pytest.mark.parametrize("form", ["custom", "emulated"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "pairs"), [(7, 3), (16, 8), (40, 8)])
def test_split_projections_equal_the_reference_forward_and_backward(form, width, pairs, dtype, per_group):
    form(split_rotary)
    projected = torch.randn(5, 3, 2 * (per_group + 2) * width).to(dtype).requires_grad_()
    arguments = projected, *angles(5, pairs), 2, width
    assert choice.disagreement(split_rotary, arguments) is None


@SPLITS
@pytest.mark.parametrize("form", ["custom", "emulated"], indirect=True)
def test_split_projections_are_read_and_written_in_place(form, per_group):
    projected = torch.randn(4, 2, 2 * (per_group + 2) * 16)
    before = projected.clone().unflatten(-1, (2, per_group + 2, 16))
    cos, sin = angles(4, 4)
    query, key, value = form(split_rotary)(projected, cos, sin, 2, 16)
    torch.testing.assert_close(query.double(), exact(before[..., :-2, :].flatten(2, 3), cos, sin))
    torch.testing.assert_close(key.double(), exact(before[..., -2, :], cos, sin))
    assert torch.equal(value, before[..., -1, :])
    assert value.untyped_storage().data_ptr() == projected.untyped_storage().data_ptr()
    shares = query.untyped_storage().data_ptr() == projected.untyped_storage().data_ptr()
    assert shares == (per_group == 1)


@SPLITS
@pytest.mark.parametrize("form", ["custom", "emulated"], indirect=True)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (1, 2, 0, 3), (3, 1, 2, 0)])
def test_gradients_of_split_projections_may_have_any_strides(form, order, per_group):
    """Attention returns gradients in the order in which it computes."""
    cos, sin = angles(5, 4)

    def gradient_of(operator):
        projected = torch.randn(5, 3, 2 * (per_group + 2) * 16, generator=torch.Generator().manual_seed(1))
        projected.requires_grad_()
        parts = operator(projected, cos, sin, 2, 16)
        inverse = [order.index(dim) for dim in range(4)]
        generator = torch.Generator().manual_seed(2)
        drawn = [torch.randn(part.shape, generator=generator) for part in parts]
        above = [each.permute(order).contiguous().permute(inverse) for each in drawn]
        return torch.autograd.grad(parts, projected, above)[0]

    torch.testing.assert_close(gradient_of(form(split_rotary)), gradient_of(split_rotary.reference))


def test_a_projection_that_others_keep_is_not_changed_unnoticed():
    projected = torch.randn(4, 2, 48, requires_grad=True) * 1.0
    square = projected * projected
    split_rotary.fused(projected, *angles(4, 4), 1, 16)
    with refused(RuntimeError, "an inplace operation"):
        square.sum().backward()
