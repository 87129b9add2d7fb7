"""Adagrad with states created by the first update."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad

from neox_model.optim.base import WeightOptimizer

__all__ = ["Adagrad"]


class Adagrad(WeightOptimizer):
    """torch's Adagrad, with states only for the parameters that it updates.

    torch.optim.Adagrad creates states in its constructor. 16-bit training and ZeRO replace the parameters
    afterwards, and DeepSpeed then builds another torch.optim.Adagrad, with one parameter group and no
    schedule.

    Args:
        parameters: parameter groups, each with `weight_decay`.
        lr: learning rate.
        lr_decay: the learning rate is divided by 1 + lr_decay * number of updates.
        initial_accumulator_value: initial value of the sums of squares.
        eps: added to the denominator.
        foreach: use torch's foreach implementation; None: torch chooses.
        fused: use torch's fused implementation.

    Source: Duchi, Hazan, Singer: Adaptive Subgradient Methods, JMLR 12 (2011).
    """

    def __init__(
        self,
        parameters: list[dict[str, Any]],
        *,
        lr: float,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        numbers = {
            "lr": lr,
            "lr_decay": lr_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        for name, number in numbers.items():
            if not number >= 0:
                raise ValueError(f"{name} must be at least 0, not {number}")
        if foreach and fused:
            raise ValueError("foreach and fused are mutually exclusive; set only one of them")
        super().__init__(parameters, numbers | {"weight_decay": 0.0, "foreach": foreach, "fused": fused})

    def _apply(self) -> None:
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state_of(parameter, group) for parameter in parameters]
            adagrad(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["sum"] for state in states],
                [state["step"] for state in states],
                lr=float(group["lr"]),
                weight_decay=group["weight_decay"],
                lr_decay=group["lr_decay"],
                eps=group["eps"],
                maximize=False,
                foreach=group["foreach"],
                fused=group["fused"],
            )

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            device = parameter.device if group["fused"] else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["sum"] = torch.full_like(parameter, group["initial_accumulator_value"])
        return state
