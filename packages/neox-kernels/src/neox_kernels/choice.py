"""Choice between the fused and the reference implementation, made once, when a layer is built.

If the fused implementation is requested explicitly and unavailable, an error states the reason; only "auto"
falls back, and logs why. "auto" selects the fused implementation if it agrees with the reference on the
run's shapes and is faster; layers under torch.compile then call the reference, which the compiler fuses with
the operators around it.

A decision of "auto" is a file in the folder `decisions` of the cache of compiled operators, because times
vary, and a resumed run must choose the same. Its name is a hash of everything that it depends on. Delete the
folder to repeat the trials.
"""

import functools
import hashlib
import json
import logging
import os
import statistics
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from neox_kernels import build
from neox_kernels.availability import Availability
from neox_kernels.errors import KernelBuildError, KernelUnavailable
from neox_kernels.operator import MakeExample, Operator

__all__ = [
    "Availability",
    "KernelUnavailable",
    "Requested",
    "choose",
    "disagreement",
    "graph_ms",
    "median_ms",
    "relative_error",
    "results_and_gradients",
    "time_forms",
]

logger = logging.getLogger(__name__)

Requested = bool | Literal["auto"]
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Shape = tuple[int, ...]
# Tensors with sizes and without memory.
_META = torch.device("meta")
# Largest |fused - reference| / |reference| (Euclidean norms of whole tensors) that rounding can cause.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2, torch.float64: 1e-12}
# More than a GPU's cache holds.
_CACHE_BYTES = 256 << 20


def choose(
    requested: Requested,
    operator: Operator[Parameters, Result],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    shape: Shape | None = None,
    agree: Callable[[bool], bool] | None = None,
    example: MakeExample | None = None,
) -> Callable[Parameters, Result]:
    """Return the implementation that a layer calls: fused, reference, or fused except under torch.compile.

    Compiles the fused operators if they are requested and not compiled yet; other processes wait for it.

    Args:
        requested: False for the reference, True for the fused implementation or an error, "auto" for the
            faster one.
        operator: one of this package's operators.
        device: device of the layer's tensors.
        dtype: dtype of the layer's activations.
        shape: shape of the operator's first argument in this run; required by "auto" for its trial.
        agree: returns True if all ranks pass True, so that all ranks choose the same under "auto".
        example: makes the arguments of this run for the trial; None: the operator's example.

    Raises:
        KernelUnavailable: requested is True and the fused implementation is unavailable.
    """
    device = torch.device(device)
    if requested is False:
        return operator.reference
    availability = operator.available(device=device, dtype=dtype, may_build=True)
    if requested is True:
        if not availability.ok:
            raise KernelUnavailable(
                f"the fused {operator.name} is required and unavailable: {availability.reason}; "
                'set it to "auto" or false to use the reference implementation'
            )
        _log_once(operator.name, f"fused ({availability.reason})")
        return operator.fused
    if availability.ok:
        availability = _verdict(operator, device, dtype, shape, example)
    if agree is not None and not agree(availability.ok) and availability.ok:
        availability = Availability(False, "it is unavailable or not faster on another rank")
    form = "fused" if availability.ok else "reference implementation:"
    _log_once(operator.name, f"{form} {availability.reason}")
    return operator.fused_in_eager if availability.ok else operator.reference


@functools.cache
def _verdict(
    operator: Operator[..., Any],
    device: torch.device,
    dtype: torch.dtype,
    shape: Shape | None,
    example: MakeExample | None,
) -> Availability:
    """Compare and time both implementations on the run's shape, once per host."""
    if shape is None:
        raise ValueError(f'{operator.name}: "auto" requires the shape of the first argument; pass shape')
    make = example or operator.example
    comparable = operator.comparable_example or make

    def find() -> Availability:
        difference = disagreement(operator, comparable(shape, dtype, device))
        if difference is not None:
            logger.warning("%s %s: %s", operator.name, shape, difference)
            return Availability(False, difference)
        fused_ms, reference_ms = time_forms(operator, make(shape, dtype, device))
        figures = f"{fused_ms:.3f} ms, reference {reference_ms:.3f} ms, {shape}, {dtype}"
        return Availability(fused_ms < reference_ms, figures)

    try:
        return _decide(_key_of(operator, device, make(shape, dtype, _META)), find)
    except RuntimeError as error:  # OutOfMemoryError is one; a trial must not end a run.
        reason = f"the trial failed: {str(error).splitlines()[0]}"
        logger.warning("%s %s: %s", operator.name, shape, reason)
        return Availability(False, reason)


@functools.cache
def _log_once(name: str, message: str) -> None:
    logger.info("%s: %s", name, message)


def _key_of(operator: Operator[..., Any], device: torch.device, arguments: tuple[Any, ...]) -> str:
    """Return a description of everything that a decision depends on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    parts = (operator.name, build.source_hash(), name, torch.__version__, torch.version.cuda)
    described = [
        f"{argument.dtype} {tuple(argument.shape)} {argument.stride()} {argument.requires_grad}"
        if isinstance(argument, Tensor)
        else repr(argument)
        for argument in arguments
    ]
    return json.dumps([*parts, *described], allow_nan=False)


def _decide(key: str, find: Callable[[], Availability]) -> Availability:
    """Return the stored decision; if there is none, find it and store it.

    Nothing is stored if this user cannot write to the folder, other users can, or the disk is full.
    """
    path = build.cache_folder() / "decisions" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    try:
        build.private_folder(build.cache_folder())
        build.private_folder(path.parent)
    except KernelBuildError:
        return find()
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] == key:
            return Availability(stored["ok"], f"{stored['reason']} (stored)")
    except (OSError, ValueError, KeyError, TypeError):
        pass  # None yet, or not a whole file of this version: it is written again.
    found, aside = find(), path.with_suffix(f".{os.getpid()}")
    record = {"key": key, "ok": found.ok, "reason": found.reason}
    try:
        aside.write_text(json.dumps(record, allow_nan=False), encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        logger.warning("the choice of a kernel is not stored, and may be another one next time: %s", error)
    return found


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

    A graph leaves out the time between launches, in which a run computes other layers. As in a run,
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


def _timed(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
    return graph_ms(functools.partial(_forward_and_backward, function, args, Tensor.detach))
