"""Initialization of weights: the init methods, with the same result on every layout.

The generator of each parameter is seeded from (seed, logical name) and fills the whole float32 tensor, of
which each rank keeps its block. The result does not depend on the order of construction or the layout; the
cost is the memory and the time for one whole parameter on each rank.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from neox_model.parallel.logical import InitMethod, Logical, Writable, named_logical_parameters
from neox_model.parallel.random import mixed_seed

__all__ = ["INIT_METHODS", "build_init_method", "initialize_parameters"]


def _normal(std: float) -> InitMethod:
    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        nn.init.normal_(tensor, std=std, generator=generator)

    return fill


def _orthogonal(gain: float) -> InitMethod:
    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        nn.init.orthogonal_(tensor, gain=gain, generator=generator)

    return fill


def _xavier_uniform(tensor: Tensor, generator: torch.Generator) -> None:
    nn.init.xavier_uniform_(tensor, generator=generator)


def _xavier_normal(tensor: Tensor, generator: torch.Generator) -> None:
    nn.init.xavier_normal_(tensor, generator=generator)


# name -> (standard deviation, hidden size, layers) -> init method.
INIT_METHODS: dict[str, Callable[[float, int, int], InitMethod]] = {
    "normal": lambda std, hidden, layers: _normal(std),
    "scaled_normal": lambda std, hidden, layers: _normal(std / math.sqrt(2 * layers)),
    "single_residual_scaled_normal": lambda std, hidden, layers: _normal(std / math.sqrt(layers)),
    "orthogonal": lambda std, hidden, layers: _orthogonal(math.sqrt(2)),
    "scaled_orthogonal": lambda std, hidden, layers: _orthogonal(math.sqrt(2 / layers)),
    "xavier_uniform": lambda std, hidden, layers: _xavier_uniform,
    "xavier_normal": lambda std, hidden, layers: _xavier_normal,
    "small_init": lambda std, hidden, layers: _normal(math.sqrt(2 / (5 * hidden))),
    "wang_init": lambda std, hidden, layers: _normal(2 / (layers * math.sqrt(hidden))),
}


def build_init_method(name: str, *, std: float, hidden_size: int, num_layers: int) -> InitMethod:
    """Return the init method of this name for a model of this width and depth.

    Args:
        name: a key of INIT_METHODS.
        std: standard deviation of "normal"; "scaled_normal" divides it by sqrt(2 layers), and
            "single_residual_scaled_normal" by sqrt(layers).
        hidden_size: model width, for "small_init" and "wang_init".
        num_layers: depth, for "scaled_normal", "scaled_orthogonal" and "wang_init".

    Source: GPT-NeoX's init methods; small_init arXiv:1910.05895, wang_init from GPT-J.
    """
    return INIT_METHODS[name](std, hidden_size, num_layers)


def initialize_parameters(
    model: nn.Module, seed: int, *, on_cpu: bool = True, writable: Writable = nullcontext
) -> None:
    """Fill every parameter of this rank with its block of the whole tensor.

    Args:
        model: module whose parameters were created by `logical_parameter`.
        seed: random seed of the model; the same on all ranks.
        on_cpu: draw the numbers on the CPU; the generator of the parameter's device gives different ones.
        writable: context manager that returns the tensor to fill for a parameter; None: other ranks fill it.
    """
    for name, parameter in named_logical_parameters(model):
        with writable(parameter) as target, torch.no_grad():
            if target is not None:
                device = torch.device("cpu") if on_cpu else parameter.device
                generator = torch.Generator(device).manual_seed(mixed_seed("init", seed, name))
                _fill(target, parameter.logical, generator)  # type: ignore[attr-defined]


def _fill(parameter: Tensor, logical: Logical, generator: torch.Generator) -> None:
    whole = torch.empty(logical.shape, device=generator.device, dtype=torch.float32)
    logical.init(whole, generator)
    block = whole[tuple(slice(start, stop) for start, stop in logical.slices)]
    if block.shape != parameter.shape:
        parameter.zero_()
    parameter[tuple(slice(0, length) for length in block.shape)] = block.to(parameter)
