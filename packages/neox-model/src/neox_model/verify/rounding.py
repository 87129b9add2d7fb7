"""Largest allowed differences between runs on different layouts, by precision.

Layouts sum in different orders. An adaptive optimizer divides each gradient by its magnitude, so an element
whose gradient is rounding noise changes at random, as it does if only the sign of the gradient counts; such
elements, identified by their second moment or a state that also shows the size of gradients, are skipped.

Known limit: with Lion in 16 bit, rounding changes the signs of more elements than are skipped, so a resume on
another layout may exceed the limit of a tensor.
"""

from dataclasses import dataclass

__all__ = ["LIMITS", "Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Largest relative differences that are considered rounding.

    Args:
        loss: limit for the loss of an iteration.
        norm: limit for the gradient norm of an iteration.
        setting: limit for a learning rate.
        tensor: limit for the 2-norm of the difference of a tensor, relative to the 2-norm of its change since
            the interruption.
        noise: elements are skipped if their gradient is below this fraction of the largest root mean square
            gradient of any tensor.
    """

    loss: float
    norm: float
    setting: float
    tensor: float
    noise: float


LIMITS = {
    "fp32": Limits(loss=1e-5, norm=1e-4, setting=1e-6, tensor=1e-3, noise=1e-4),
    "fp16": Limits(loss=1e-3, norm=1e-2, setting=1e-6, tensor=5e-2, noise=1e-2),
    "bf16": Limits(loss=5e-3, norm=5e-2, setting=1e-6, tensor=1e-1, noise=5e-2),
}
