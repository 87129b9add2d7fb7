"""Faults that `make gpu-gate` must find, each planted in a layer or a kernel."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from neox_model.layers.residual_layer import ResidualLayer

__all__ = ["LAYER_FAULTS", "SPILLING_FLAGS"]


def _plant(change: Callable[[Tensor], Tensor]) -> Callable[[ResidualLayer], None]:
    """Return a function that applies a change to what a layer's first norm returns besides its input."""

    def spoil(layer: ResidualLayer) -> None:
        layer.norm1.register_forward_hook(lambda module, inputs, output: (output[0], change(output[1])))

    return spoil


def _break_graph(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


# By what is planted. Inductor removes the copy, so that only layers that are not compiled make it.
LAYER_FAULTS = {
    "an extra copy": _plant(Tensor.clone),
    "an .item()": _plant(lambda x: x * x.detach().sum().item()),
    "a graph break": _plant(_break_graph),
}
# Too few registers for any kernel.
SPILLING_FLAGS = ("-maxrregcount=24", "-include", str(Path(__file__).with_name("spill.h")))
