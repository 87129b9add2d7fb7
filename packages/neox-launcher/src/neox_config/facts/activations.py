"""Activation functions by name; neox_model/layers/activations.py implements them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["ACTIVATION_FACTS", "ActivationFacts", "ActivationName"]

ActivationName = Literal[
    "gelu",
    "geglu",
    "geglu_tanh",
    "relu",
    "squared_relu",
    "softsign",
    "swish",
    "mish",
    "silu",
    "swiglu",
    "reglu",
    "glu",
    "bilinear",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationFacts:
    """One activation.

    Args:
        is_gated: True if the block has a second input matrix, whose output is activated and multiplied with
            that of the first.
        kept_tensors: tensors of the inner width that autograd stores in addition to the result.
    """

    is_gated: bool = False
    kept_tensors: int = 1

    def mlp_width(self, hidden_size: int, intermediate_size: int | None = None, multiple_of: int = 1) -> int:
        """Return the inner width of the feed-forward block.

        Args:
            hidden_size: width of the model.
            intermediate_size: size as in GPT-NeoX: with a gated activation, two thirds of it are the width of
                both input matrices together. None: the block has about as many weights with any activation.
            multiple_of: the width is rounded up to a multiple of this.

        Source: the widths of GPT-NeoX's feed-forward block.
        """
        if intermediate_size is None:
            width = 8 * hidden_size // 3 if self.is_gated else 4 * hidden_size
        else:
            width = -(-(2 * intermediate_size // 3) // 2) if self.is_gated else intermediate_size
        return -(-width // multiple_of) * multiple_of


ACTIVATION_FACTS: Mapping[str, ActivationFacts] = {
    "gelu": ActivationFacts(),
    "geglu": ActivationFacts(is_gated=True),
    "geglu_tanh": ActivationFacts(is_gated=True),
    "relu": ActivationFacts(kept_tensors=0),
    "squared_relu": ActivationFacts(),
    "softsign": ActivationFacts(kept_tensors=2),
    "swish": ActivationFacts(),
    "mish": ActivationFacts(),
    "silu": ActivationFacts(),
    "swiglu": ActivationFacts(is_gated=True),
    "reglu": ActivationFacts(is_gated=True, kept_tensors=0),
    "glu": ActivationFacts(is_gated=True, kept_tensors=0),
    "bilinear": ActivationFacts(is_gated=True, kept_tensors=0),
}
