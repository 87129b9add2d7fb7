"""What compression in training does to one split matrix, and to all matrices of a model by iteration."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neox_config.extras.compression.facts import bits_at, quantized_share
from neox_model.extras.compression.pruning import Pruning, largest
from neox_model.extras.compression.quantization import InputQuantizer, WeightQuantizer
from neox_model.parallel.linear import ColumnParallelLinear, RowParallelLinear
from neox_model.parallel.logical import Logical, LogicalState, named_logical_modules

__all__ = [
    "BitSchedule",
    "Compressed",
    "CompressedLinear",
    "MatrixCompression",
    "PruningRule",
    "compress_matrix",
    "compressed_matrices",
    "learn_masks",
]

Linear = ColumnParallelLinear | RowParallelLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class BitSchedule:
    """When weights are quantized to how many bits.

    Args:
        offset: first iteration with quantized weights.
        start: number of bits then.
        target: number of bits at the end.
        period: iterations between reductions by one bit.
        mix_ratio: share of quantized values in the first iteration after each change, and its growth per
            iteration; None: all of them.
    """

    offset: int
    start: int
    target: int
    period: int
    mix_ratio: float | None = None

    def at(self, iteration: int, progress: Tensor | None = None) -> tuple[int | None, float]:
        """Return the number of bits, None before the offset, and the share of quantized values.

        Args:
            iteration: counted from 0.
            progress: the number of bits, the iteration in which it changed, and the period, which grows;
                None: the period stays.
        """
        bits = bits_at(
            iteration, offset=self.offset, start=self.start, target=self.target, period=self.period
        )
        if bits is None:
            return None, 1.0
        changed = self.offset + (self.start - bits) * self.period
        if progress is not None:
            bits, changed, _ = progress.tolist()
        if self.mix_ratio is None:
            return bits, 1.0
        return bits, quantized_share(iteration - changed, self.mix_ratio)

    def new_progress(self) -> Tensor:
        """Return the progress at the start."""
        return torch.tensor([self.start, self.offset, self.period])

    def advance(self, progress: Tensor, iteration: int, factor: int) -> None:
        """Reduce the number of bits if it is due in an iteration, and multiply the period by a factor."""
        bits, changed, period = progress.tolist()
        if iteration >= self.offset and bits > self.target and iteration - changed >= period:
            progress.copy_(torch.tensor([bits - 1, iteration, period * factor]))


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningRule:
    """How a mask is made.

    Args:
        method: l1, topk or snip_momentum.
        offset: first iteration with a mask.
        ratio: share of what is kept.
        scope: name of the group of matrices whose weights are compared with each other by snip_momentum.
        end: iteration from which the mask of snip_momentum stays.
        stride: iterations between changes of the mask of snip_momentum.
        pattern: pattern of snip_momentum.
    """

    method: str
    offset: int
    ratio: float
    scope: str = ""
    end: int = 0
    stride: int = 1
    pattern: str = ""

    @property
    def is_learned(self) -> bool:
        """Return True if the mask has scores that are trained."""
        return self.method == "topk"


class MatrixCompression(nn.Module):
    """The compression of a matrix, which the matrix calls in its forward pass.

    Args:
        quantizer: of its weights.
        bits: schedule of the quantizer.
        inputs: quantizer of its inputs.
        inputs_offset: first iteration with quantized inputs.
        prunings: the masks, by what they prune: sparse (single weights), rows, heads.
        rules: how each mask is made.
        stretches_periods: the period of the bits grows in training (see `BitSchedule.advance`).
    """

    def __init__(
        self,
        *,
        quantizer: WeightQuantizer | None,
        bits: BitSchedule | None,
        inputs: InputQuantizer | None,
        inputs_offset: int,
        prunings: dict[str, Pruning],
        rules: dict[str, PruningRule],
        stretches_periods: bool = False,
    ) -> None:
        super().__init__()
        self.progress = bits.new_progress() if stretches_periods and bits is not None else None
        self.quantizer = quantizer
        self.inputs = inputs
        self.prunings = nn.ModuleDict(prunings)
        self.bits = bits
        self.rules = rules
        self._inputs_offset = inputs_offset

    def forward(
        self, inputs: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the inputs, the weights and the bias with which the matrix computes."""
        if self.inputs is not None:
            inputs = self.inputs(inputs)
        return inputs, self.of_weight(weight), self.of_bias(bias)

    def of_weight(self, weight: Tensor) -> Tensor:
        """Return the weights with which the matrix computes: quantized, then pruned."""
        if self.quantizer is not None:
            weight = self.quantizer(weight)
        for pruning in self.prunings.values():
            weight = pruning(weight)
        return weight

    def of_bias(self, bias: Tensor | None) -> Tensor | None:
        """Return the bias with which the matrix computes."""
        if bias is None or "rows" not in self.prunings:
            return bias
        pruned: Tensor = self.prunings["rows"](bias)
        return pruned

    def begin(self, iteration: int) -> None:
        """Prepare an iteration, counted from 0; masks are not changed."""
        if self.quantizer is not None and self.bits is not None:
            self.quantizer.bits, self.quantizer.share = self.bits.at(iteration, self.progress)
            self.quantizer.iteration = iteration
        if self.inputs is not None:
            self.inputs.is_on = iteration >= self._inputs_offset
        for kind, pruning in self.masks():
            pruning.is_on = iteration >= self.rules[kind].offset

    @torch.no_grad()
    def learn_masks(self, values_of: Callable[[nn.Parameter], Tensor]) -> None:
        """Compute the masks that have scores and are applied (see `learn_masks`)."""
        for kind, pruning in self.masks():
            if pruning.is_on and pruning.scores is not None:
                whole = pruning.whole(values_of(pruning.scores))
                pruning.set_mask(largest(whole, self.rules[kind].ratio))

    def masks(self) -> Iterator[tuple[str, Pruning]]:
        """Yield the masks with what they prune."""
        for kind, pruning in self.prunings.items():
            assert isinstance(pruning, Pruning)
            yield kind, pruning


class CompressedLinear(nn.Module):
    """The part of a matrix that is compressed."""

    weight: nn.Parameter
    bias: Any
    compression: MatrixCompression

    def operands(self, inputs: Tensor) -> Any:
        """Return the inputs, the weights and the bias with which the matrix computes."""
        return self.compression(inputs, self.weight, self.bias)

    def begin_iteration(self, iteration: int) -> None:
        """Prepare an iteration, counted from 0. Collective over the ranks that split the matrix."""
        self.compression.begin(iteration)
        self.compression.learn_masks(lambda scores: scores.detach())

    def logical_states(self, name: str) -> Iterator[LogicalState]:
        """Yield the masks without scores and the ranges of inputs.

        Args:
            name: the matrix's logical name.
        """
        for kind, pruning in self.compression.masks():
            if pruning.scores is None:
                yield LogicalState(
                    name=f"{name}.compression.prunings.{kind}/keep",
                    shape=pruning.logical.shape,
                    slices=pruning.logical.slices,
                    start=0,
                    values=pruning.keep.view(-1),
                    is_split_over_model=pruning.logical.model_parallel,
                )
        whole = {}
        if self.compression.inputs is not None and not self.compression.inputs.is_dynamic:
            whole["inputs/range"] = self.compression.inputs.range
        if self.compression.progress is not None:
            whole["quantizer/progress"] = self.compression.progress
        for state, values in whole.items():
            yield LogicalState(
                name=f"{name}.compression.{state}",
                shape=tuple(values.shape),
                slices=((0, len(values)),),
                start=0,
                values=values,
                is_split_over_model=False,
            )


# Class of a matrix -> that of a compressed one.
_COMPRESSED: Mapping[type[nn.Module], type[nn.Module]] = {
    kind: type(f"Compressed{kind.__name__}", (CompressedLinear, kind), {})
    for kind in (ColumnParallelLinear, RowParallelLinear)
}


def compress_matrix(module: Linear, compression: MatrixCompression) -> None:
    """Let a matrix compute with its compression, as a subclass of its class."""
    module.__class__ = _COMPRESSED[type(module)]  # type: ignore[assignment]
    module.compression = compression


@dataclass(frozen=True, slots=True)
class Compressed:
    """A matrix of this rank that is compressed.

    Args:
        name: its logical name.
        module: the layer with the matrix.
    """

    name: str
    module: CompressedLinear

    @property
    def compression(self) -> MatrixCompression:
        """What is done to it."""
        return self.module.compression

    @property
    def logical(self) -> Logical:
        """The description of the whole matrix and of this rank's block."""
        found: Logical = self.module.weight.logical  # type: ignore[attr-defined]
        return found


def compressed_matrices(model: nn.Module) -> list[Compressed]:
    """Return the compressed matrices of this rank, in the order of the model."""
    return [
        Compressed(name, module)
        for name, module in named_logical_modules(model)
        if isinstance(module, CompressedLinear)
    ]


def learn_masks(matrices: list[Compressed], values_of: Callable[[nn.Parameter], Tensor]) -> None:
    """Compute the masks that have scores and are applied. Collective over the ranks that split the matrices.

    Args:
        matrices: this rank's.
        values_of: returns all elements that this tensor-parallel rank has of scores.
    """
    for matrix in matrices:
        matrix.compression.learn_masks(values_of)
