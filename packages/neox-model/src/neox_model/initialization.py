"""How weights start: the eight init methods, and a filling that gives the same model on every layout.

Each parameter's generator is seeded from (seed, logical name) and fills the whole float32 tensor, of which
a rank keeps its block. So the start depends neither on the order of construction nor on the split; the
price is one whole parameter's memory, and time, on each rank.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from neox_model.parallel.logical import InitMethod, Logical, named_logical_parameters
from neox_model.parallel.random import mixed_seed

__all__ = ["INIT_METHODS", "build_init_method", "initialize_parameters"]

Writable = Callable[[nn.Parameter], AbstractContextManager[bool]]


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
    "orthogonal": lambda std, hidden, layers: _orthogonal(math.sqrt(2)),
    "scaled_orthogonal": lambda std, hidden, layers: _orthogonal(math.sqrt(2 / layers)),
    "xavier_uniform": lambda std, hidden, layers: _xavier_uniform,
    "xavier_normal": lambda std, hidden, layers: _xavier_normal,
    "small_init": lambda std, hidden, layers: _normal(math.sqrt(2 / (5 * hidden))),
    "wang_init": lambda std, hidden, layers: _normal(2 / (layers * math.sqrt(hidden))),
}


def build_init_method(name: str, *, std: float, hidden_size: int, num_layers: int) -> InitMethod:
    """The init method of that name, for a model of this width and depth.

    Args:
        name: a key of INIT_METHODS.
        std: standard deviation of "normal", and of "scaled_normal" before it is divided by sqrt(2 layers).
        hidden_size: model width, for "small_init" and "wang_init".
        num_layers: depth, for "scaled_normal", "scaled_orthogonal" and "wang_init".

    Source: GPT-NeoX's init methods; small_init arXiv:1910.05895, wang_init from GPT-J.
    """
    return INIT_METHODS[name](std, hidden_size, num_layers)


def _always_writable(parameter: nn.Parameter) -> AbstractContextManager[bool]:
    return nullcontext(True)


def initialize_parameters(
    model: nn.Module, seed: int, *, on_cpu: bool = True, writable: Writable = _always_writable
) -> None:
    """Fill every parameter of this rank with its block of the whole tensor.

    Args:
        model: parameters made by `logical_parameter`.
        seed: of the model; the same on all ranks.
        on_cpu: make the numbers on the CPU and not on the parameter's device (whose generator gives others).
        writable: a context around each parameter in which it has its memory; gives whether to fill it.
    """
    for name, parameter in named_logical_parameters(model):
        with writable(parameter) as should_fill, torch.no_grad():
            if should_fill:
                device = torch.device("cpu") if on_cpu else parameter.device
                generator = torch.Generator(device).manual_seed(mixed_seed("init", seed, name))
                _fill(parameter, parameter.logical, generator)  # type: ignore[attr-defined]


def _fill(parameter: Tensor, logical: Logical, generator: torch.Generator) -> None:
    whole = torch.empty(logical.shape, device=generator.device, dtype=torch.float32)
    logical.init(whole, generator)
    block = whole[tuple(slice(start, stop) for start, stop in logical.slices)]
    if block.shape != parameter.shape:
        parameter.zero_()
    parameter[tuple(slice(0, length) for length in block.shape)] = block.to(parameter)
