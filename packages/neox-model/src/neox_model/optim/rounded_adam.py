"""Adam with moments in bfloat16, which take half the memory.

In bfloat16 a mean square does not change by less than 2^-9 of itself if it is rounded to the nearest number,
and an update with a beta of 0.999 rarely changes it by more: it would grow, and never shrink. So moments are
rounded up or down at random, with the probabilities by which they keep their value in the mean. The random
bits are a hash of the update's number and of the element's place in the whole weight: they do not depend on
the layout, and a resumed training has the same.
"""

from typing import Any

import torch
from torch import Tensor

from neox_model.optim.base import WeightOptimizer

__all__ = ["RoundedAdam", "rounded_at_random_"]

# Elements that are updated at once: what is computed in float32 takes some bytes for each.
_ELEMENTS = 2**22
_WORD = 0xFFFFFFFF
# bfloat16 has the upper 16 bits of float32.
_DROPPED = 0xFFFF
_MOMENTS = ("exp_avg", "exp_avg_sq")


class RoundedAdam(WeightOptimizer):
    """Adam that computes in the precision of the weights, and stores both moments in bfloat16.

    Args:
        parameters: parameter groups, each with `weight_decay`.
        lr: learning rate.
        betas: decay of the running means of gradients and squared gradients.
        eps: added to the denominator.
        is_decoupled: decoupled weight decay.
        is_corrected: correct the running means for their initialization with zero.

    Source: arXiv:1412.6980; arXiv:1711.05101 (decoupled decay); arXiv:2010.06192 (stochastic rounding).
    """

    state_dtype = torch.bfloat16

    def __init__(
        self,
        parameters: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        is_decoupled: bool = True,
        is_corrected: bool = True,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._is_decoupled, self._is_corrected = is_decoupled, is_corrected

    def _apply(self) -> None:
        for parameter, gradient, group in self._trained():
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state |= {name: torch.zeros_like(parameter, dtype=self.state_dtype) for name in _MOMENTS}
            state["step"] += 1
            if not parameter.numel():
                continue
            rows, columns = _places(parameter)
            held = [parameter, gradient, *(state[name] for name in _MOMENTS)]
            height = max(1, _ELEMENTS // len(columns))
            parts = zip(*(each.view(len(rows), -1).split(height) for each in held), strict=True)
            for values, numbers in zip(parts, rows.split(height), strict=True):
                self._update(values, numbers, columns, int(state["step"]), group)

    def _update(
        self, held: tuple[Tensor, ...], rows: Tensor, columns: Tensor, number: int, group: dict[str, Any]
    ) -> None:
        """Make an update of some rows of a weight, given with their gradient and moments."""
        weight, gradient, mean, square = held
        decay, betas = group["weight_decay"], group["betas"]
        if decay and self._is_decoupled:
            weight.mul_(1 - group["lr"] * decay)
        elif decay:
            gradient = gradient + decay * weight
        new_mean = mean.to(weight.dtype).lerp_(gradient, 1 - betas[0])
        new_square = square.to(weight.dtype).mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        of_mean, of_square = (1 - beta**number if self._is_corrected else 1.0 for beta in betas)
        root = (new_square / of_square).sqrt_().add_(group["eps"])
        weight.addcdiv_(new_mean, root, value=-group["lr"] / of_mean)
        for which, (stored, new) in enumerate(((mean, new_mean), (square, new_square))):
            stored.copy_(rounded_at_random_(new.float(), _hashed(rows, 2 * number + which), columns))


def rounded_at_random_(values: Tensor, row_bits: Tensor, column_bits: Tensor) -> Tensor:
    """Round float32 values to neighbouring numbers of bfloat16, in place; return them.

    Args:
        values: a matrix.
        row_bits: a random odd 32-bit number for each row.
        column_bits: the same for each column.
    """
    bits = (row_bits.unsqueeze(1) * column_bits) >> 16
    whole = values.view(torch.int32)
    whole.add_(bits.bitwise_and_(_DROPPED)).bitwise_and_(~_DROPPED)
    return values


def _places(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of a parameter's rows in the whole weight, and hashes of those of its columns."""
    logical, device = getattr(parameter, "logical", None), parameter.device
    whole = parameter.shape if logical is None else logical.shape
    starts = [0] * parameter.dim() if logical is None else [start for start, _ in logical.slices]
    columns = torch.zeros(1, dtype=torch.int64, device=device)
    for start, held, length in list(zip(starts, parameter.shape, whole, strict=True))[1:]:
        along = torch.arange(start, start + held, device=device)
        columns = (columns.unsqueeze(1) * length + along).flatten()
    return torch.arange(starts[0], starts[0] + len(parameter), device=device), _hashed(columns, 0)


def _hashed(numbers: Tensor, seed: int) -> Tensor:
    """Return a random odd 32-bit number for each number, as int32."""
    mixed = numbers + 0x9E3779B1 * (seed + 1)
    for _ in range(2):
        mixed = ((mixed ^ (mixed >> 16)) & _WORD) * 0x45D9F3B
    return ((mixed ^ (mixed >> 16)) | 1).to(torch.int32)
