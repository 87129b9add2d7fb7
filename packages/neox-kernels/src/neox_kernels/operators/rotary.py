"""Rotary position embedding of queries and keys, on the first channels of each head.

    with R pairs, channels i < R and i + R are rotated by the angle of (position s, pair i):
    y_i     = x_i cos - x_(i+R) sin
    y_(i+R) = x_(i+R) cos + x_i sin
    channels from 2 R on are unchanged;      backward rotates by the negative angle

`rotary` returns new tensors. `rotary_` changes its arguments in place, both in one launch, and does not
access the unchanged channels: if a quarter of each head is rotated, it moves a quarter of the bytes. Use its
return values. With gradients it requires tensors that PyTorch allows to be changed in place (slices of a
projection, not results of `chunk` or `split`); autograd raises an error for others.

Source: arXiv:2104.09864, section 3.2; the pairing of channel i with i + R as in GPT-NeoX.
"""

from typing import Any

import torch
from torch import Tensor

from neox_kernels import native
from neox_kernels.custom_operator import custom_operator
from neox_kernels.operator import Operator
from neox_kernels.precision import widen

__all__ = ["rotary", "rotary_"]


def _turn(x_SBNK: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    pairs = cos_SR.shape[-1]
    cos, sin = widen(cos_SR)[:, None, None, :], widen(sin_SR)[:, None, None, :]
    first, second = widen(x_SBNK[..., :pairs]), widen(x_SBNK[..., pairs : 2 * pairs])
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x_SBNK.dtype), x_SBNK[..., 2 * pairs :]), dim=-1)


def _rotary(query_SBNK: Tensor, key_SBNK: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> tuple[Tensor, Tensor]:
    """Apply rotary position embeddings to queries and keys.

    Args:
        query_SBNK: queries.
        key_SBNK: keys; may have fewer heads.
        cos_SR: cosines of the angles by position and pair (R: pairs, at most half the head width), float32.
        sin_SR: sines of the angles.

    Returns:
        Queries and keys, same shapes and dtypes.
    """
    return _turn(query_SBNK, cos_SR, sin_SR), _turn(key_SBNK, cos_SR, sin_SR)


def _heads(given: Tensor, result: Tensor) -> tuple[int, tuple[int, ...], int, tuple[int, ...], int]:
    return given.data_ptr(), given.stride()[:3], result.data_ptr(), result.stride()[:3], given.shape[2]


def _launch(
    compiled: Any,
    given: tuple[Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    inverse: bool,
) -> None:
    query = given[0]
    cos, sin = angles[0].contiguous(), angles[1].contiguous()
    compiled.rotary(
        *native.site(query), _heads(given[0], results[0]), _heads(given[1], results[1]), cos.data_ptr(),
        sin.data_ptr(), query.shape[0], query.shape[1], query.shape[3], cos.shape[1], inverse,
    )  # fmt: skip


def _with_contiguous_heads(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@custom_operator("rotary")
def _forward(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    compiled = native.compiled_for(query, key, cos, sin)
    if compiled is None:
        sine = -sin if inverse else sin
        return _turn(query, cos, sine).contiguous(), _turn(key, cos, sine).contiguous()
    query, key = _with_contiguous_heads(query), _with_contiguous_heads(key)
    results = (
        torch.empty_like(query, memory_format=torch.contiguous_format),
        torch.empty_like(key, memory_format=torch.contiguous_format),
    )
    _launch(compiled, (query, key), results, (cos, sin), inverse)
    return results


@_forward.register_fake
def _(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    contiguous = torch.contiguous_format
    return torch.empty_like(query, memory_format=contiguous), torch.empty_like(key, memory_format=contiguous)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(
    ctx: Any, query_gradient: Tensor, key_gradient: Tensor
) -> tuple[Tensor, Tensor, None, None, None]:
    return *_forward(query_gradient, key_gradient, *ctx.saved_tensors, not ctx.inverse), None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)


@custom_operator("rotary_", mutates_args=("query", "key"))
def _in_place(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
    compiled = native.compiled_for(query, key, cos, sin)
    if compiled is None or query.stride(-1) != 1 or key.stride(-1) != 1:
        turned = _forward(query, key, cos, sin, False)
        query.copy_(turned[0])
        key.copy_(turned[1])
    else:
        _launch(compiled, (query, key), (query, key), (cos, sin), False)


class _InPlace(torch.autograd.Function):
    """Autograd function of the in-place form: new tensors on the same memory."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        query, key, cos, sin = tensors
        query, key = query.detach(), key.detach()
        _in_place(query, key, cos, sin)
        ctx.save_for_backward(cos, sin)
        return query, key

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *_forward(*gradients, *ctx.saved_tensors, True), None, None


def _check(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
    if query.ndim != 4 or key.ndim != 4 or query.dtype != key.dtype:
        raise ValueError(
            "query and key must have the shape [sequence, batch, heads, width] and the same dtype"
        )
    if query.shape[:2] != key.shape[:2] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"query has shape {tuple(query.shape)} and key {tuple(key.shape)}; only the number of heads may "
            "differ"
        )
    if cos.shape != sin.shape or cos.shape[0] != query.shape[0] or 2 * cos.shape[1] > query.shape[3]:
        raise ValueError(
            f"cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}; both must be "
            f"({query.shape[0]}, pairs) "
            f"with at most {query.shape[3] // 2} pairs"
        )


def _fused_rotary(
    query_SBNK: Tensor, key_SBNK: Tensor, cos_SR: Tensor, sin_SR: Tensor
) -> tuple[Tensor, Tensor]:
    _check(query_SBNK, key_SBNK, cos_SR, sin_SR)
    query, key = _forward(query_SBNK, key_SBNK, widen(cos_SR), widen(sin_SR), False)
    return query, key


def _fused_rotary_in_place(
    query_SBNK: Tensor, key_SBNK: Tensor, cos_SR: Tensor, sin_SR: Tensor
) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():  # The compiler plans memory itself and requires functional operators.
        return _fused_rotary(query_SBNK, key_SBNK, cos_SR, sin_SR)
    _check(query_SBNK, key_SBNK, cos_SR, sin_SR)
    if torch.is_grad_enabled() and (query_SBNK.requires_grad or key_SBNK.requires_grad):
        query, key = _InPlace.apply(query_SBNK, key_SBNK, widen(cos_SR), widen(sin_SR))  # type: ignore[no-untyped-call]
        return query, key
    _in_place(query_SBNK, key_SBNK, widen(cos_SR), widen(sin_SR))
    return query_SBNK, key_SBNK


def _example(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    query = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    key = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    angles = torch.rand(shape[0], shape[-1] // 2, device=device) * 6
    return query, key, angles.cos(), angles.sin()


def _consumable_example(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    query, key, cos, sin = _example(shape, dtype, device)
    return query.detach(), key.detach(), cos, sin


rotary = Operator(name="rotary", reference=_rotary, fused=_fused_rotary, example=_example)
rotary_ = Operator(
    name="rotary_", reference=_rotary, fused=_fused_rotary_in_place, example=_consumable_example
)
