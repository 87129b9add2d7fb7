"""Count the bytes that a layer's operators move if they are called one by one, without a GPU.

Tensors are on the meta device: they have shapes and no memory. Matrix products and attention are left out,
and so is what an operator reads again from a cache.
"""

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_gate.layers import ARCHITECTURES, inputs_of
from gpu_gate.lowering import flash_attention
from neox_config import Resolved
from neox_kernels import add_rms_norm, bias_swiglu, rms_norm, rotary, split_rotary
from neox_model.assembly.operators import Operators
from neox_model.assembly.transformer import build_layer
from neox_model.layers.residual_layer import ResidualLayer
from neox_model.parallel.groups import SINGLE_RANK

__all__ = ["PLAIN", "llama_operators", "moved_bytes"]

PLAIN = Operators()
_NOT_COUNTED = {"mm", "bmm", "addmm", "_scaled_dot_product_flash_attention"}
_NOT_COUNTED |= {"_scaled_dot_product_flash_attention_backward"}
# Results without values, and views that the schemas do not declare.
_MOVES_NOTHING = {"empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "_reshape_alias"}
_ONLY_WRITES = {"copy_", "zero_", "fill_"}


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of the elements that are different places of memory."""
    places = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return places * tensor.itemsize


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [each for each in values if isinstance(each, Tensor)]


class _Counting(TorchDispatchMode):
    """Counts the bytes that operators read and write, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        name, schema = func.overloadpacket.__name__, func._schema
        is_view = any(given.alias_info and not given.alias_info.is_write for given in schema.returns)
        if is_view or name in _NOT_COUNTED or name in _MOVES_NOTHING:
            return results
        for declared, given in zip(schema.arguments, args, strict=False):
            is_written = declared.alias_info is not None and declared.alias_info.is_write
            times = 1 if not is_written or name in _ONLY_WRITES else 2
            self.moved[name] += times * sum(map(_bytes, _tensors(given)))
        made = [result for result in _tensors(results) if not any(result is each for each in args)]
        self.moved[name] += sum(map(_bytes, made))
        return results


def llama_operators() -> Operators:
    """Return the fused operators of a Llama-like layer."""
    return Operators(
        rotary=rotary.fused,
        split_rotary=split_rotary.fused,
        gated_activation=bias_swiglu.fused,
        gated_again=bias_swiglu.again,
        norm=rms_norm.fused,
        norm_of_sum=add_rms_norm.fused,
        norm_with_input=rms_norm.with_input,
    )


def _rms_norm(inputs: Tensor, shape: Sequence[int], weight: Tensor, epsilon: float) -> Tensor:
    """Move the bytes of the operator that PyTorch has for GPUs; other devices compute it with several."""
    return rms_norm.fused(inputs, weight, epsilon)


def moved_bytes(operators: Operators, **settings: Any) -> Counter[str]:
    """Return the bytes that forward and backward of the gate's Llama-like layer move in bf16, by operator.

    Args:
        operators: those that the layer calls.
        settings: of the layer, besides those of the gate.
    """
    resolved: Resolved = ARCHITECTURES["Llama"].resolved(**settings)
    cls, kwargs = build_layer(resolved.model, 0, resolved.run, group=SINGLE_RANK, operators=operators)
    layer: ResidualLayer = cls(**kwargs).train().to(device="meta", dtype=torch.bfloat16)
    inputs = inputs_of(resolved, "meta", torch.bfloat16, has_documents=False)
    mocks = (
        mock.patch.object(functional, "scaled_dot_product_attention", flash_attention),
        mock.patch.object(functional, "rms_norm", _rms_norm),
    )
    with mocks[0], mocks[1], _Counting() as counting:
        # The first call fills tables that later iterations reuse.
        layer.block(*inputs)
        counting.moved.clear()
        output = layer.block(*inputs)
        output.backward(torch.empty_like(output))
    return counting.moved
