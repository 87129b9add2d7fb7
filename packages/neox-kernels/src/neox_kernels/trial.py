"""Compare and time both implementations of an operator on the same arguments."""

import functools
import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neox_kernels.operator import Operator

__all__ = ["Timing", "disagreement", "median_ms", "relative_error", "results_and_gradients", "time_forms"]

logger = logging.getLogger(__name__)

# Largest |fused - reference| / |reference| (Euclidean norms of whole tensors) that rounding can cause.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2, torch.float64: 1e-12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of forward and backward, in milliseconds."""

    fused_ms: float
    compiled_ms: float


def relative_error(given: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference divided by the norm of the expected tensor."""
    wide, exact = given.detach().double(), expected.detach().double()
    if torch.equal(wide, exact):
        return 0.0
    size = exact.norm().item()
    return float((wide - exact).norm().item() / (size if size > 0 else 1.0))


def _fresh(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        arg.detach().clone().requires_grad_(arg.requires_grad) if isinstance(arg, Tensor) else arg
        for arg in args
    )


def results_and_gradients(
    function: Callable[..., Any], args: tuple[Any, ...], *, above_dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return the outputs of the function and the gradients of its arguments, for a fixed output gradient.

    Args:
        function: called with copies of the arguments.
        args: tensors, with or without gradients, and other values.
        above_dtype: dtype that the output gradient is rounded to; None for the outputs' own.
    """
    return _forward_and_backward(
        function, _fresh(args), lambda output: _fixed_normal(output, above_dtype or output.dtype)
    )


def _forward_and_backward(
    function: Callable[..., Any], args: tuple[Any, ...], above: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    outputs = function(*args)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    leaves = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    if not leaves:
        return outputs
    return outputs + list(torch.autograd.grad(outputs, leaves, [above(output) for output in outputs]))


def _fixed_normal(like: Tensor, rounded_to: torch.dtype) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randn(like.shape, generator=generator, device=like.device).to(rounded_to).to(like.dtype)


def disagreement(operator: Operator[..., Any], args: tuple[Any, ...]) -> str | None:
    """Describe how fused results differ from the reference beyond rounding; None if they agree."""
    fused = results_and_gradients(operator.fused, args)
    plain = results_and_gradients(operator.reference, args)
    for number, (given, expected) in enumerate(zip(fused, plain, strict=True)):
        error, bound = relative_error(given, expected), TOLERANCE[expected.dtype]
        if not error <= bound:  # True for NaN, too.
            return f"result {number} differs from the reference by {error:.2g}; tolerance {bound:.2g}"
    return None


def median_ms(run: Callable[[], object], *, repeat: int = 20, warm_up: int = 5) -> float:
    """Return the median time of a run on the current GPU, measured by device events."""
    for _ in range(warm_up):
        run()
    times: list[float] = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def time_forms(operator: Operator[..., Any], args: tuple[Any, ...]) -> Timing:
    """Time forward and backward of the fused implementation, and of the reference under torch.compile.

    The outputs are used as output gradients, so that only the operator is timed.
    """
    compiled = torch.compile(operator.reference, dynamic=False)
    return Timing(
        fused_ms=median_ms(functools.partial(_forward_and_backward, operator.fused, args, Tensor.detach)),
        compiled_ms=_compiled_ms(operator.name, compiled, operator.reference, args),
    )


def _compiled_ms(
    name: str, compiled: Callable[..., Any], plain: Callable[..., Any], args: tuple[Any, ...]
) -> float:
    try:
        return median_ms(functools.partial(_forward_and_backward, compiled, args, Tensor.detach))
    except RuntimeError as error:  # For example, if torch.compile finds no C compiler.
        logger.warning(
            "torch.compile of the reference %s failed (%s); timing PyTorch eager instead",
            name,
            str(error).splitlines()[0],
        )
        return median_ms(functools.partial(_forward_and_backward, plain, args, Tensor.detach))
