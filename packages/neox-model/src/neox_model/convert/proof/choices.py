"""Positions at which two programs may choose different experts, because two of them have nearly equal scores.

The outputs of two experts differ by far more than rounding, so such positions say nothing about a conversion.
In a model of several layers, neither do the later ones, which see them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_model.layers.experts import Router

__all__ = ["clear_choices"]

# Difference of logits. Those of two programs differ by a few roundings of float32, about 1e-7 of the largest.
_CLOSE = 1e-5


def clear_choices(model: nn.Module, run: Callable[[], Any]) -> Tensor | None:
    """Return the positions [B, S] up to which all experts are chosen clearly; None without a choice.

    Args:
        model: ours.
        run: computes it.
    """
    close: list[Tensor] = []

    def watch(router: nn.Module, inputs: tuple[Tensor, ...], results: Any) -> None:
        assert isinstance(router, Router)
        if router.chosen < router.number:
            bias_E = None if router.logits_bias is None else router.logits_bias.float()
            logits_SBE = functional.linear(inputs[0].float(), router.weight.float(), bias_E)
            highest = logits_SBE.topk(router.chosen + 1, dim=-1).values
            close.append(highest[..., -2] - highest[..., -1] < _CLOSE)

    hooks = [each.register_forward_hook(watch) for each in model.modules() if isinstance(each, Router)]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(close).any(dim=0).cumsum(dim=0).t() == 0 if close else None
