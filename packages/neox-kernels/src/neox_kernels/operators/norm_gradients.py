"""The gradients of a norm, alone and of a sum; the same functions for every kind of norm."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from neox_kernels.custom_operator import CustomOperator

__all__ = ["register_gradients"]


def register_gradients(
    forward: CustomOperator, forward_of_sum: CustomOperator, backward: CustomOperator
) -> Callable[..., Any]:
    """Register the gradients of a norm, and return the form of `forward` that returns x too.

    Args:
        forward: of x, the weight, other parameters and epsilon; returns the result and the rows' statistics.
        forward_of_sum: the same of x and a residual; returns the sum in front.
        backward: of the gradient of the result, that of the sum or None, x or the sum, the weight, and the
            statistics; returns the gradients of x and of the parameters.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(inputs[0], inputs[1], output[1])

    def differentiate(ctx: Any, gradient: Tensor, *_unused: None) -> tuple[Tensor | None, ...]:
        return *backward(gradient, None, *ctx.saved_tensors), None

    def differentiate_with_input(
        ctx: Any, of_input: Tensor | None, gradient: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        # Nothing depends on the normalized x.
        if gradient is None:
            return of_input, *(None for _ in ctx.needs_input_grad[1:])
        return *backward(gradient, of_input, *ctx.saved_tensors), None

    def keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(output[0], inputs[2], output[2])

    def differentiate_sum(
        ctx: Any, of_sum: Tensor | None, gradient: Tensor | None, *_unused: None
    ) -> tuple[Tensor | None, ...]:
        total, weight, statistics = ctx.saved_tensors
        # Nothing depends on the normalized sum.
        gradient = torch.zeros_like(total) if gradient is None else gradient
        of_x, *of_parameters = backward(gradient, of_sum, total, weight, statistics)
        return of_x, of_x, *of_parameters, None

    backward.refuse_gradient()
    forward.register_autograd(differentiate, setup_context=keep)
    forward_of_sum.register_autograd(differentiate_sum, setup_context=keep_sum)
    return forward.with_input(differentiate_with_input, setup_context=keep)
