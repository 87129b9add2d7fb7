"""The definition of an operator: a reference and a fused implementation with the same signature."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from neox_kernels import native
from neox_kernels.availability import Availability

__all__ = ["MakeExample", "Operator"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
MakeExample = Callable[[tuple[int, ...], torch.dtype, torch.device], tuple[Any, ...]]


class AvailabilityCheck(Protocol):
    """Function that checks whether a fused implementation can be used; it may compile to find out."""

    def __call__(self, device: torch.device, dtype: torch.dtype, *, may_build: bool) -> Availability:
        """Return whether it can be used for tensors of this device and dtype, with the reason."""


@dataclass(frozen=True)
class Operator(Generic[Parameters, Result]):
    """A named operator. Calling it runs the reference; `neox_kernels.choice.choose` returns the fused one.

    Attributes:
        name: name used in messages and logs.
        reference: reference implementation in PyTorch, for every device and floating-point dtype.
        fused: the custom operator with the same signature.
        example: builds arguments for a shape of the first argument, used to compare and to time.
        comparable_example: arguments without randomness, if the results are otherwise random.
        availability: checks whether `fused` can be used.
        again: computes the result again, together with the gradients of the tensors: of (gradient of the
            result, arguments). For a backward pass of a result that was not kept; None: there is none.
        with_input: `fused`, but returns the first argument and the result; its backward pass adds the
            gradient that arrives at the first. None: there is none.
    """

    name: str
    reference: Callable[Parameters, Result]
    fused: Callable[Parameters, Result]
    example: MakeExample
    comparable_example: MakeExample | None = None
    availability: AvailabilityCheck = native.availability
    again: Callable[..., Any] | None = None
    with_input: Callable[Parameters, tuple[Tensor, Result]] | None = None

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """Run the reference implementation."""
        return self.reference(*args, **kwargs)

    def fused_in_eager(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """Run the fused implementation; under torch.compile the reference.

        The compiler fuses the reference with the operators around it, which a custom operator prevents.
        """
        form = self.reference if torch.compiler.is_compiling() else self.fused
        return form(*args, **kwargs)

    def available(
        self, *, device: torch.device | str, dtype: torch.dtype, may_build: bool = False
    ) -> Availability:
        """Return whether the fused implementation can be used for this device and dtype, with the reason.

        Args:
            device: device of the tensors.
            dtype: dtype of the tensors.
            may_build: compile the operators if they are not compiled yet; otherwise they are unavailable.
        """
        return self.availability(torch.device(device), dtype, may_build=may_build)
