"""What an operator is: a plain twin, a fused form with the same signature, and when that one can be used."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import torch

from neox_kernels import native
from neox_kernels.availability import Availability

__all__ = ["Operator"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
MakeExample = Callable[[tuple[int, ...], torch.dtype, torch.device], tuple[Any, ...]]


class SaysAvailability(Protocol):
    """Whether a fused form can be used for tensors of a device and type; may compile it to find out."""

    def __call__(self, device: torch.device, dtype: torch.dtype, *, may_build: bool) -> Availability:
        """Whether it can be used, and why not."""


@dataclass(frozen=True)
class Operator(Generic[Parameters, Result]):
    """A named operator. Calling it runs the plain twin; `neox_kernels.choice.choose` gives the fused form.

    Attributes:
        name: how messages and logs call it.
        reference: the plain twin, ordinary differentiable PyTorch, for every device and floating type.
        fused: the custom operator with the same signature.
        example: makes arguments for a shape of the first argument, to check and to time the operator with.
        comparable_example: where chance makes the two forms differ, arguments for which they agree.
        availability: says whether `fused` can be used.
    """

    name: str
    reference: Callable[Parameters, Result]
    fused: Callable[Parameters, Result]
    example: MakeExample
    comparable_example: MakeExample | None = None
    availability: SaysAvailability = native.availability

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """What the plain twin gives."""
        return self.reference(*args, **kwargs)

    def available(
        self, *, device: torch.device | str, dtype: torch.dtype, may_build: bool = False
    ) -> Availability:
        """Whether the fused form can be used for tensors of this device and type, and why not.

        Args:
            device: where the tensors are.
            dtype: their type.
            may_build: whether to compile the operators now if they are not; else that is the reason given.
        """
        return self.availability(torch.device(device), dtype, may_build=may_build)
