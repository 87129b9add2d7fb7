"""Functions whose gradients of weights are sums over tokens, in float32 for 16-bit tensors.

On a CPU PyTorch adds the tokens of layer norms and embeddings in the dtype of the tensors: a sum in bfloat16
ignores what is below 1/256 of it, so that the gradients of 16,384 tokens are over 80 % wrong. On a GPU it
adds them in float32, and everywhere those of biases, RMS norms and matrix products.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["embedding", "layer_norm"]


def _adds_in_16_bits(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.dtype in (torch.bfloat16, torch.float16)


def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    """Return the rows of a table, as torch's `embedding`.

    Args:
        indices: int64, any shape.
        weight: the table, [rows, width].
    """
    has_gradient = weight.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_exporting()
    if not (has_gradient and _adds_in_16_bits(weight)):
        return functional.embedding(indices, weight)
    # The gradients of equal indices are added in float32; then each row of the table gets one.
    distinct, places = indices.unique(return_inverse=True)
    rows = functional.embedding(distinct, weight).float()
    return functional.embedding(places, rows).to(weight.dtype)


def layer_norm(inputs: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """Normalize over the last dimension, as torch's `layer_norm`.

    Args:
        inputs: any shape `[..., width]`.
        weight: [width]; its dtype may differ from the inputs'.
        bias: [width], with the weight's dtype; None: no bias.
        epsilon: added to the variance.
    """
    if not _adds_in_16_bits(inputs):
        return functional.layer_norm(inputs, weight.shape, weight, bias, epsilon)
    if torch.compiler.is_compiling():
        # Fused with the copies in float32, which then take no memory.
        wide_bias = None if bias is None else bias.float()
        wide = functional.layer_norm(inputs.float(), weight.shape, weight.float(), wide_bias, epsilon)
        return wide.to(inputs.dtype)
    result: Tensor = _LayerNorm.apply(inputs, weight, bias, epsilon)
    return result


class _LayerNorm(torch.autograd.Function):
    """Keeps the 16-bit inputs, and computes the backward pass in float32."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
        wide_bias = None if bias is None else bias.float()
        result, mean, inverse = torch.native_layer_norm(
            inputs, weight.shape, weight.float(), wide_bias, epsilon
        )
        ctx.save_for_backward(inputs, weight, mean, inverse)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, mean, inverse = ctx.saved_tensors
        # Autograd casts the results. They do not depend on the bias: any tensor of its shape can be passed.
        wide, size = weight.float(), weight.shape
        return *torch.ops.aten.native_layer_norm_backward(
            gradient.float(), inputs.float(), size, mean, inverse, wide, wide, ctx.needs_input_grad[:3]
        ), None
