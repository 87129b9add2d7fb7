"""How far trainings on different layouts may differ, by precision.

Another layout sums in another order. An adaptive optimizer divides each gradient by its own size, so an
element whose gradient is rounding noise moves at random; such elements are left out, by their second moment.
"""

from dataclasses import dataclass

__all__ = ["LIMITS", "Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Largest relative differences that count as rounding.

    Args:
        loss: of the loss of an iteration.
        norm: of the gradient norm of an iteration.
        setting: of a learning rate.
        tensor: 2-norm of the difference of a tensor, relative to the 2-norm of what it changed by since the
            interruption.
        noise: elements whose gradients are below this part of the largest root mean square of any tensor's
            are not compared.
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
