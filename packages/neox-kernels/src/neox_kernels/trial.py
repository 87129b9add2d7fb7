"""Compare and time both implementations of an operator on the same arguments."""

import functools
import logging
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from neox_kernels.operator import Operator

__all__ = [
    "compiled_ms",
    "disagreement",
    "graph_ms",
    "median_ms",
    "relative_error",
    "results_and_gradients",
    "time_forms",
]

logger = logging.getLogger(__name__)

# Largest |fused - reference| / |reference| (Euclidean norms of whole tensors) that rounding can cause.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2, torch.float64: 1e-12}
# More than a GPU's cache holds.
_CACHE_BYTES = 256 << 20


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

    def fixed_normal(like: Tensor) -> Tensor:
        generator = torch.Generator(like.device).manual_seed(0)
        drawn = torch.randn(like.shape, generator=generator, device=like.device)
        return drawn.to(above_dtype or like.dtype).to(like.dtype)

    return _forward_and_backward(function, _fresh(args), fixed_normal)


def _forward_and_backward(
    function: Callable[..., Any], args: tuple[Any, ...], above: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    outputs = function(*args)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    leaves = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    if not leaves:
        return outputs
    return outputs + list(torch.autograd.grad(outputs, leaves, [above(output) for output in outputs]))


def disagreement(operator: Operator[..., Any], args: tuple[Any, ...]) -> str | None:
    """Describe how fused results differ from the reference beyond rounding; None if they agree."""
    fused = results_and_gradients(operator.fused, args)
    plain = results_and_gradients(operator.reference, args)
    for number, (given, expected) in enumerate(zip(fused, plain, strict=True)):
        error, bound = relative_error(given, expected), TOLERANCE[expected.dtype]
        if not error <= bound:  # True for NaN, too.
            return f"result {number} differs from the reference by {error:.2g}; tolerance {bound:.2g}"
    return None


def median_ms(
    run: Callable[[], object],
    *,
    repeat: int = 20,
    warm_up: int = 5,
    before: Callable[[], object] | None = None,
) -> float:
    """Return the median time of a run on the current GPU, measured by device events.

    Args:
        run: what is timed.
        repeat: number of timed runs.
        warm_up: number of runs before.
        before: called before each timed run, and not timed.
    """
    for _ in range(warm_up):
        run()
    times: list[float] = []
    for _ in range(repeat):
        if before is not None:
            before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def graph_ms(run: Callable[[], object], *, repeat: int = 20, warm_up: int = 3) -> float:
    """Return the median time of a run on the current GPU, replayed as a CUDA graph from a cold cache.

    A graph leaves out the time between launches, in which a training computes other layers. As in a training,
    the inputs are not in the cache.
    """
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            run()
        with torch.cuda.graph(graph, stream=stream):
            run()
        flushed = torch.empty(_CACHE_BYTES, dtype=torch.int8, device="cuda")
        return median_ms(graph.replay, repeat=repeat, warm_up=1, before=flushed.zero_)


def time_forms(operator: Operator[..., Any], args: tuple[Any, ...]) -> tuple[float, float]:
    """Return the times of forward and backward of the fused and of the reference implementation, in ms.

    The outputs are used as output gradients, so that only the operator is timed.
    """
    return _timed(operator.fused, args), _timed(operator.reference, args)


def compiled_ms(operator: Operator[..., Any], args: tuple[Any, ...]) -> float | None:
    """Time forward and backward of the reference under torch.compile; None, with a warning, if it fails."""
    try:
        return _timed(torch.compile(operator.reference, dynamic=False), args)
    except RuntimeError as error:  # For example, if torch.compile finds no C compiler.
        reason = str(error).splitlines()[0]
        logger.warning("torch.compile of the reference %s failed (%s)", operator.name, reason)
        return None


def _timed(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
    return graph_ms(functools.partial(_forward_and_backward, function, args, Tensor.detach))
