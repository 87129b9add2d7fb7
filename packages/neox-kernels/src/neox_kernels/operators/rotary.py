"""Rotary position embedding of queries and keys, on the first channels of each head.

    with R pairs, channels i < R and i + R are rotated by the angle of (position s, pair i):
    y_i     = x_i cos - x_(i+R) sin
    y_(i+R) = x_(i+R) cos + x_i sin
    channels from 2 R on are unchanged;      backward rotates by the negative angle

`rotary` returns new tensors. `rotary_` changes its arguments in place, both in one launch, and does not
access the unchanged channels: if a quarter of each head is rotated, it moves a quarter of the bytes. Use its
return values. With gradients it requires tensors that PyTorch allows to be changed in place (slices of a
projection, not results of `chunk` or `split`); autograd raises an error for others.

`split_rotary` takes the projection of queries, keys and values itself, which it may change: it is rotated in
place, unless queries share keys, because attention needs these queries side by side. The gradients of all
three are written into one tensor, that of the projection.

Source: arXiv:2104.09864, section 3.2; the pairing of channel i with i + R as in GPT-NeoX.
"""

from typing import Any

import torch
from torch import Tensor

from neox_kernels import native
from neox_kernels.custom_operator import custom_operator
from neox_kernels.operator import Operator
from neox_kernels.precision import widen

__all__ = ["rotary", "rotary_", "split_rotary"]


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


@custom_operator("rotary", like=("query", "key"))
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


# Projections ------------------------------------------------------------------------------------------------


def _split_rotary(
    projected_SBX: Tensor, cos_SR: Tensor, sin_SR: Tensor, groups: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a projection into queries, keys and values, and rotate queries and keys.

    Args:
        projected_SBX: by group, the queries that share a key, the key and its value. It may be overwritten.
        cos_SR: cosines of the angles by position and pair (R: pairs, at most half the head width), float32.
        sin_SR: sines of the angles.
        groups: number of groups (G).
        width: width of a head (K).

    Returns:
        query_SBNK, key_SBGK and value_SBGK, which may share memory with the projection.
    """
    query, key, value = _parts(projected_SBX, groups, width)
    return *_rotary(query.flatten(2, 3), key, cos_SR, sin_SR), value


def _parts(projected: Tensor, groups: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views: the queries, [S, B, groups, per group, width], keys and values, [S, B, groups, width]."""
    sharers = projected.shape[-1] // (groups * width) - 2
    by_group = projected.view(*projected.shape[:2], groups, sharers + 2, width)
    return by_group.narrow(-2, 0, sharers), by_group.select(-2, sharers), by_group.select(-2, sharers + 1)


def _as_rows_of_groups(queries: Tensor, groups: int) -> Tensor:
    """Return [S, B groups, heads of a group, K] of [S, B, heads, K], without a copy if strides allow it."""
    length, batch, heads, width = queries.shape
    return queries.reshape(length, batch * groups, heads // groups, width)


@custom_operator("split_rotary_backward")
def _join(
    of_query: Tensor, of_key: Tensor, of_value: Tensor, cos: Tensor, sin: Tensor, groups: int
) -> Tensor:
    """Return the gradient of the projection, from those of queries, keys and values."""
    compiled = native.compiled_for(of_query, of_key, of_value, cos, sin)
    result = _empty_projection(of_query, groups)
    query, key, value = _parts(result, groups, of_query.shape[-1])
    value.copy_(of_value)
    if compiled is None:
        query.copy_(_turn(of_query, cos, -sin).view(query.shape))
        key.copy_(_turn(of_key, cos, -sin))
        return result
    given = _as_rows_of_groups(of_query, groups), _as_rows_of_groups(of_key, groups)
    of_rows = query.flatten(1, 2), key.unsqueeze(3).flatten(1, 2)
    aligned = _with_contiguous_heads(given[0]), _with_contiguous_heads(given[1])
    _launch(compiled, aligned, of_rows, (cos, sin), True)
    return result


def _empty_projection(query: Tensor, groups: int) -> Tensor:
    length, batch, heads, width = query.shape
    return query.new_empty(length, batch, (heads + 2 * groups) * width)


@_join.register_fake
def _(of_query: Tensor, of_key: Tensor, of_value: Tensor, cos: Tensor, sin: Tensor, groups: int) -> Tensor:
    return _empty_projection(of_query, groups)


_join.refuse_gradient()


def _split(
    projected: Tensor, cos: Tensor, sin: Tensor, groups: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = _parts(projected, groups, width)
    if query.shape[3] == 1:
        query = query.squeeze(3)
        _in_place(query, key, cos, sin)
        return query, key, value
    rows = query.flatten(1, 2), key.unsqueeze(3).flatten(1, 2)
    turned, turned_key = _forward(*rows, cos, sin, False)
    return turned.view(*query.shape[:2], groups * query.shape[3], width), turned_key.view(key.shape), value


class _Split(torch.autograd.Function):
    """Autograd function of the split: new tensors, on the memory of the projection or a copy."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin, ctx.groups, _ = others
        ctx.save_for_backward(cos, sin)
        return _split(projected.detach(), *others)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _join(*gradients, *ctx.saved_tensors, ctx.groups), None, None, None, None


def _fused_split_rotary(
    projected_SBX: Tensor, cos_SR: Tensor, sin_SR: Tensor, groups: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = _parts(projected_SBX, groups, width)
    if torch.compiler.is_compiling():  # The compiler plans memory itself and requires functional operators.
        return *_fused_rotary(query.flatten(2, 3), key, cos_SR, sin_SR), value
    _check(key, key, cos_SR, sin_SR)
    arguments = projected_SBX.contiguous(), widen(cos_SR), widen(sin_SR), groups, width
    if torch.is_grad_enabled() and projected_SBX.requires_grad:
        parts: tuple[Tensor, Tensor, Tensor] = _Split.apply(*arguments)  # type: ignore[no-untyped-call]
        return parts
    return _split(*arguments)


def _example(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    query = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    key = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    angles = torch.rand(shape[0], shape[-1] // 2, device=device) * 6
    return query, key, angles.cos(), angles.sin()


def _consumable_example(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    query, key, cos, sin = _example(shape, dtype, device)
    return query.detach(), key.detach(), cos, sin


def _projection_example(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    sequence, batch, heads, width = shape
    projected = torch.randn(sequence, batch, 3 * heads * width, dtype=dtype, device=device)
    angles = torch.rand(sequence, width // 2, device=device) * 6
    return projected.requires_grad_(), angles.cos(), angles.sin(), heads, width


rotary = Operator(name="rotary", reference=_rotary, fused=_fused_rotary, example=_example)
rotary_ = Operator(
    name="rotary_", reference=_rotary, fused=_fused_rotary_in_place, example=_consumable_example
)
split_rotary = Operator(
    name="split_rotary", reference=_split_rotary, fused=_fused_split_rotary, example=_projection_example
)
