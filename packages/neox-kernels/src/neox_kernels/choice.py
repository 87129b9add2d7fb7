"""Choice between the fused and the reference implementation, made once, when a layer is built.

If the fused implementation is requested explicitly and unavailable, an error states the reason; only "auto"
falls back, and logs why. "auto" selects the fused implementation if it agrees with the reference on the
run's shapes and is faster; layers under torch.compile then call the reference, which the compiler fuses with
the operators around it. Decisions are stored on this host (decisions.py), so that a resumed training makes
the same ones.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from neox_kernels import decisions, trial
from neox_kernels.availability import Availability
from neox_kernels.errors import KernelUnavailable
from neox_kernels.operator import MakeExample, Operator

__all__ = ["Availability", "KernelUnavailable", "Requested", "choose"]

logger = logging.getLogger(__name__)

Requested = bool | Literal["auto"]
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Shape = tuple[int, ...]
# Tensors with sizes and without memory.
_META = torch.device("meta")


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
        difference = trial.disagreement(operator, comparable(shape, dtype, device))
        if difference is not None:
            logger.warning("%s %s: %s", operator.name, shape, difference)
            return Availability(False, difference)
        fused_ms, reference_ms = trial.time_forms(operator, make(shape, dtype, device))
        figures = f"{fused_ms:.3f} ms, reference {reference_ms:.3f} ms, {shape}, {dtype}"
        return Availability(fused_ms < reference_ms, figures)

    try:
        return decisions.decide(decisions.key_of(operator, device, make(shape, dtype, _META)), find)
    except RuntimeError as error:  # OutOfMemoryError is one; a trial must not end a training.
        reason = f"the trial failed: {str(error).splitlines()[0]}"
        logger.warning("%s %s: %s", operator.name, shape, reason)
        return Availability(False, reason)


@functools.cache
def _log_once(name: str, message: str) -> None:
    logger.info("%s: %s", name, message)
