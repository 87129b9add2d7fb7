"""Norms by name; neox_model/layers/norms.py implements them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from neox_config.facts.conditions import one_of

__all__ = ["NORM_FACTS", "NormFacts", "NormName", "with_bias", "with_epsilon", "with_weight"]

NormName = Literal["layernorm", "rmsnorm", "scalenorm", "apexlayernorm", "non_parametric_layernorm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormFacts:
    """One norm.

    Args:
        epsilon: parameter of the section `model` that the layer gets as `epsilon`.
        vectors: weights with one number per channel.
        has_bias: True if one of them is a bias, which `use_bias_in_norms: false` leaves out.
        scalars: single numbers among the weights.
        subtracts_mean: it has the mean of the channels removed before it is scaled.
        one_operator_on: types of devices on which autograd stores only the input, as for one operator of
            PyTorch. A formula of several operators stores two float32 tensors.
    """

    epsilon: str
    vectors: int = 0
    scalars: int = 0
    has_bias: bool = False
    subtracts_mean: bool = False
    one_operator_on: tuple[str, ...] = ()

    def num_weights(self, width: int, *, with_bias: bool = True) -> int:
        """Return the number of weights of a norm over `width` channels."""
        vectors = self.vectors - (self.has_bias and not with_bias)
        return vectors * width + self.scalars


_LAYER_NORM = NormFacts(
    epsilon="layernorm_epsilon",
    vectors=2,
    has_bias=True,
    subtracts_mean=True,
    one_operator_on=("cpu", "cuda"),
)

NORM_FACTS: Mapping[str, NormFacts] = {
    "layernorm": _LAYER_NORM,
    "rmsnorm": NormFacts(epsilon="rms_norm_epsilon", vectors=1, one_operator_on=("cuda",)),
    "scalenorm": NormFacts(epsilon="scalenorm_epsilon", scalars=1),
    "apexlayernorm": _LAYER_NORM,
    "non_parametric_layernorm": replace(_LAYER_NORM, vectors=0, has_bias=False),
}


def with_bias() -> str:
    """Return the condition under which norms have a bias that can be left out, for the reference."""
    return f"norm is {one_of(name for name, facts in NORM_FACTS.items() if facts.has_bias)}"


def with_weight() -> str:
    """Return the condition under which norms have a weight, for the reference."""
    return f"norm is {one_of(name for name, facts in NORM_FACTS.items() if facts.vectors or facts.scalars)}"


def with_epsilon(parameter: str) -> str:
    """Return the condition under which an epsilon has an effect, for the reference."""
    return f"norm is {one_of(name for name, facts in NORM_FACTS.items() if facts.epsilon == parameter)}"
