"""Running a list of layers, with or without recomputing their activations in the backward pass.

Of every run of neighbouring transformer layers, each segment of `checkpoint_num_layers` keeps its input
alone (torch's non-reentrant checkpoint). The plain model and a pipeline's stages share this function:
DeepSpeed's own segments also count the embedding and the head, and leave every segment that touches one of
them unrecomputed.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from neox_model.layers.transformer_layer import TransformerLayer

__all__ = ["run_layers"]

Layer = Callable[[Any], Any]


def run_layers(layers: Sequence[Layer], inputs: Any, *, segment_layers: int | None) -> Any:
    """The layers one after another.

    Args:
        layers: modules or functions of what the one before gave.
        inputs: of the first.
        segment_layers: transformer layers per recomputed segment; None keeps all activations.
    """
    if segment_layers is None or not torch.is_grad_enabled():
        return _run(layers, inputs)
    for is_recomputed, group in groupby(layers, key=lambda layer: isinstance(layer, TransformerLayer)):
        run = list(group)
        if not is_recomputed:
            inputs = _run(run, inputs)
            continue
        for first in range(0, len(run), segment_layers):
            inputs = checkpoint(_run, run[first : first + segment_layers], inputs, use_reentrant=False)
    return inputs


def _run(layers: Sequence[Layer], inputs: Any) -> Any:
    for layer in layers:
        inputs = layer(inputs)
    return inputs
