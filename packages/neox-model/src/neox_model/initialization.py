"""Initialization of weights: the init methods, with the same result on every layout.

The generator of each parameter is seeded from (seed, logical name) and draws the whole float32 tensor, of
which each rank keeps its block. The result does not depend on the order of construction or the layout.

On a CPU a rank draws a tensor in pieces, copies the elements of its block from each piece, and stops after
the block, so that it needs the memory of one piece. Two kinds of tensors are drawn whole and need the memory
of a whole parameter: tensors on a GPU, whose random numbers depend on the size of the tensor, and orthogonal
matrices, whose elements depend on all random numbers.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from neox_model.parallel.logical import InitMethod, Logical, Writable, named_logical_parameters
from neox_model.parallel.random import mixed_seed

__all__ = ["INIT_METHODS", "build_init_method", "initialize_parameters", "multiplied"]


# Elements of a piece: 4 MB of float32.
_PIECE = 2**20
# torch draws normal numbers on the CPU in groups of this size; in smaller tensors, one by one.
_GROUP = 16


@dataclass(frozen=True, slots=True)
class _Drawn:
    """An init method that draws the elements independently, in order, from a distribution around 0.

    Args:
        distribution: kind of the distribution.
        scale: function of the whole shape: standard deviation of a normal, limit of a uniform distribution.
        kind: see `Logical`.
    """

    distribution: Literal["normal", "uniform"]
    scale: Callable[[tuple[float, ...]], float]
    kind: str | None = None

    def __call__(self, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill the whole tensor."""
        self.draw(tensor, tuple(tensor.shape), generator)

    def draw(self, part: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> None:
        """Fill the next elements of a tensor of this shape."""
        scale = self.scale(shape)
        if self.distribution == "normal":
            part.normal_(0.0, scale, generator=generator)
        else:
            part.uniform_(-scale, scale, generator=generator)

    def skip(self, part: Tensor, generator: torch.Generator) -> None:
        """Draw the numbers of the next elements without computing these; fills `part` with others."""
        # Either distribution takes one number of the generator for each element.
        part.uniform_(generator=generator)


def _normal(std: float) -> InitMethod:
    return _Drawn("normal", lambda shape: std)


def _xavier_std(shape: tuple[float, ...]) -> float:
    """Return the standard deviation for a matrix, as torch's xavier init methods."""
    # Of the matrix of one expert, if it has several.
    *_, outputs, inputs = shape
    return math.sqrt(2.0 / float(inputs + outputs))


def _orthogonal(gain: float) -> InitMethod:
    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        for matrix in tensor.view(-1, *tensor.shape[-2:]):
            nn.init.orthogonal_(matrix, gain=gain, generator=generator)

    return fill


# name -> (standard deviation, hidden size, layers) -> init method.
INIT_METHODS: dict[str, Callable[[float, int, int], InitMethod]] = {
    "normal": lambda std, hidden, layers: _normal(std),
    "scaled_normal": lambda std, hidden, layers: _normal(std / math.sqrt(2 * layers)),
    "single_residual_scaled_normal": lambda std, hidden, layers: _normal(std / math.sqrt(layers)),
    "orthogonal": lambda std, hidden, layers: _orthogonal(math.sqrt(2)),
    "scaled_orthogonal": lambda std, hidden, layers: _orthogonal(math.sqrt(2 / layers)),
    "xavier_uniform": lambda std, hidden, layers: _Drawn(
        "uniform", lambda shape: math.sqrt(3.0) * _xavier_std(shape)
    ),
    "xavier_normal": lambda std, hidden, layers: _Drawn("normal", _xavier_std),
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


def multiplied(init: InitMethod, kind: str, *, times: float, rows: float, columns: float) -> InitMethod:
    """Return an init method for a kind of weights, with a multiple of what it is in a smaller model.

    Args:
        init: draws independent elements.
        kind: see `Logical`.
        times: multiple of the standard deviation.
        rows: how many times as many rows a matrix has as in the smaller model.
        columns: how many times as many columns.
    """
    assert isinstance(init, _Drawn), "an orthogonal matrix has no standard deviation"
    usual = init.scale
    return replace(init, kind=kind, scale=lambda shape: times * usual((shape[0] / rows, shape[1] / columns)))


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
    shape = tuple(stop - start for start, stop in logical.slices)
    if shape != tuple(parameter.shape):
        parameter.zero_()
    block = parameter[tuple(slice(0, length) for length in shape)]
    if not block.numel():
        return
    if isinstance(logical.init, _Drawn) and generator.device.type == "cpu":
        _fill_in_pieces(block, logical, logical.init, generator)
        return
    whole = torch.empty(logical.shape, device=generator.device, dtype=torch.float32)
    logical.init(whole, generator)
    block.copy_(whole[tuple(slice(start, stop) for start, stop in logical.slices)])


def _fill_in_pieces(block: Tensor, logical: Logical, init: _Drawn, generator: torch.Generator) -> None:
    """Fill a block with what it has in the whole tensor, holding some rows of this at a time."""
    (start, stop), *others = logical.slices
    columns = tuple(slice(*limits) for limits in others)
    for first, end in _pieces(logical.shape, stop):
        rows = torch.empty((end - first, *logical.shape[1:]), dtype=torch.float32, device="cpu")
        if end <= start:
            init.skip(rows, generator)
            continue
        init.draw(rows, logical.shape, generator)
        mine = slice(max(start, first), min(stop, end))
        kept = rows[(slice(mine.start - first, mine.stop - first), *columns)]
        block[mine.start - start : mine.stop - start].copy_(kept)


def _pieces(shape: tuple[int, ...], stop: int) -> Iterator[tuple[int, int]]:
    """Yield (first row, row after the last) of pieces that together contain the rows before `stop`.

    Pieces begin at groups of torch's normal numbers, and the last one has at least one group, so that they
    have the elements of a tensor that is drawn as a whole.
    """
    length, width = shape[0], math.prod(shape[1:])
    unit = _GROUP // math.gcd(width, _GROUP)
    step = max(unit, _PIECE // width // unit * unit)
    first = 0
    while first < stop:
        end = min(first + step, length)
        if (length - end) * width < _GROUP:
            end = length
        yield first, end
        first = end
