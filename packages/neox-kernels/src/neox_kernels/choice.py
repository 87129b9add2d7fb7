"""Fused or plain: decided once, when a layer is built, from what was asked for and what is possible.

Asked for by name and not possible is an error with the reason; only "auto" may fall back, and says why.
"auto" takes the fused form where it agrees with its twin on the run's own shapes and is faster than
`torch.compile` of the twin.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from neox_kernels import trial
from neox_kernels.availability import Availability
from neox_kernels.errors import KernelUnavailable
from neox_kernels.operator import Operator

__all__ = ["Availability", "KernelUnavailable", "Requested", "choose"]

logger = logging.getLogger(__name__)

Requested = bool | Literal["auto"]
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Shape = tuple[int, ...]


def choose(
    requested: Requested,
    operator: Operator[Parameters, Result],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    shape: Shape | None = None,
    agree: Callable[[bool], bool] | None = None,
) -> Callable[Parameters, Result]:
    """The form of the operator that a layer shall call: fused or plain.

    Compiles the fused operators if they are asked for and not compiled yet; other processes wait for that.

    Args:
        requested: False for the plain twin, True for the fused form or an error, "auto" for whichever serves.
        operator: one of this package's operators.
        device: where the layer's tensors will be.
        dtype: the type of the layer's activations.
        shape: of the operator's first argument in this run; needed for "auto", which checks and times with
            it.
        agree: makes ranks choose alike under "auto": gives whether all ranks that call it together said True.

    Raises:
        KernelUnavailable: True was asked for, and the fused form cannot be used for this device and type.
    """
    device = torch.device(device)
    if requested is False:
        return operator.reference
    if requested == "auto":
        return _choose_by_trial(operator, device, dtype, shape, agree)
    availability = operator.available(device=device, dtype=dtype, may_build=True)
    if not availability.ok:
        raise KernelUnavailable(
            f"the fused form of {operator.name} was asked for and cannot be used: {availability.reason}; "
            'ask for "auto" or false to train with the plain form'
        )
    _log_once(operator.name, f"fused ({availability.reason})")
    return operator.fused


def _choose_by_trial(
    operator: Operator[Parameters, Result],
    device: torch.device,
    dtype: torch.dtype,
    shape: Shape | None,
    agree: Callable[[bool], bool] | None,
) -> Callable[Parameters, Result]:
    availability = operator.available(device=device, dtype=dtype, may_build=True)
    if availability.ok:
        availability = _verdict(operator, device, dtype, shape)
    if agree is not None and not agree(availability.ok) and availability.ok:
        availability = Availability(False, "another rank cannot use it or is not faster with it")
    _log_once(operator.name, f"{'fused' if availability.ok else 'plain, because'} {availability.reason}")
    return operator.fused if availability.ok else operator.reference


@functools.cache
def _verdict(
    operator: Operator[..., Any], device: torch.device, dtype: torch.dtype, shape: Shape | None
) -> Availability:
    """What checking and timing on the run's shape says; done once per process for each."""
    if shape is None:
        raise ValueError(f'{operator.name}: "auto" needs the shape of its first argument to try it with')
    make_comparable = operator.comparable_example or operator.example
    difference = trial.disagreement(operator, make_comparable(shape, dtype, device))
    if difference is not None:
        logger.warning("%s %s: %s", operator.name, shape, difference)
        return Availability(False, difference)
    timing = trial.time_forms(operator, operator.example(shape, dtype, device))
    figures = f"{timing.fused_ms:.3f} ms, torch.compile of the plain form {timing.compiled_ms:.3f} ms"
    figures += f", {shape}, {dtype}"
    return Availability(timing.fused_ms < timing.compiled_ms, figures)


@functools.cache
def _log_once(name: str, message: str) -> None:
    logger.info("%s: %s", name, message)
