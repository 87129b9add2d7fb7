"""Pruning of weights, rows and heads of a matrix in training.

A mask says what is kept. Without scores it is computed from the weights and stays; with scores it keeps what
has the highest ones, which are trained like weights: the gradient of a score is that of the mask, as if the
mask was the score. Masks are those of the whole matrix, wherever its parts are.

Sources: arXiv:2005.07683 (learned scores), arXiv:1810.02340 (weight times gradient).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from neox_model.parallel.collectives import all_gather, all_reduce
from neox_model.parallel.groups import Group
from neox_model.parallel.logical import Logical, logical_parameter

__all__ = ["Pruning", "block_scores", "keep_n_of_m", "kept_blocks", "largest", "threshold_of"]

# Bits of a positive float32, most significant first, in runs that are counted at once.
_RUNS = ((20, 11), (9, 11), (0, 9))


class Pruning(nn.Module):
    """The mask of a matrix, and its scores if it has some.

    Args:
        shape: number of elements of the whole mask along each dimension: those of the matrix for single
            weights; (rows, 1) for rows, (1, heads) for heads, whose columns are next to each other.
        split_dim: the dimension along which ranks split the mask, or None.
        group: the ranks that split it.
        learned: the mask has scores.

    Attributes:
        keep: this rank's part of the mask, boolean.
        is_on: apply the mask.
        scores: this rank's part of the scores, a parameter; None without.
    """

    keep: Tensor

    def __init__(self, shape: tuple[int, int], *, split_dim: int | None, group: Group, learned: bool) -> None:
        super().__init__()
        self.is_on = False
        self._split_dim, self._group = split_dim, group
        likeness = logical_parameter(shape, init=_uniform, group=group, split_dim=split_dim, kind="other")
        self.logical: Logical = likeness.logical  # type: ignore[attr-defined]
        self.scores = likeness if learned else None
        self.register_buffer("keep", torch.ones(likeness.shape, dtype=torch.bool), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weights, or one number per row, with zeros where they are not kept."""
        if not self.is_on:
            return weight
        mask = self.keep.to(weight.dtype)
        if self.scores is not None and torch.is_grad_enabled():
            mask = mask + (self.scores - self.scores.detach())
        if weight.dim() == 1:
            return weight * mask.flatten()
        repeats = weight.shape[1] // mask.shape[1]
        if mask.shape[1] > 1 and repeats > 1:
            mask = mask.repeat_interleave(repeats, dim=1)
        return weight * mask

    def kept(self, columns: int) -> Tensor:
        """Return this rank's part of the mask, for a matrix with `columns` columns on this rank."""
        return self.keep.repeat_interleave(columns // self.keep.shape[1], dim=1)

    def whole(self, part: Tensor) -> Tensor:
        """Return the whole of what ranks hold like the mask. Collective."""
        return part if self._split_dim is None else all_gather(part, self._group, self._split_dim)

    def set_mask(self, whole: Tensor) -> None:
        """Replace the mask by this rank's part of a whole one."""
        (top, bottom), (first, stop) = self.logical.slices
        self.keep.copy_(whole[top:bottom, first:stop])


def _uniform(tensor: Tensor, generator: torch.Generator) -> None:
    """Fill scores uniformly within 1 / sqrt(columns) of 0."""
    bound = tensor.shape[1] ** -0.5
    tensor.uniform_(-bound, bound, generator=generator)


def largest(values: Tensor, ratio: float) -> Tensor:
    """Return a mask of a share of the elements, the largest ones; of equal ones the first.

    The number of elements is rounded to the nearest.
    """
    flat = values.flatten()
    count = round(ratio * flat.numel())
    if count == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    bound = flat.kthvalue(flat.numel() - count + 1).values
    keep = flat > bound
    ties = (flat == bound).nonzero().flatten()[: count - int(keep.sum())]
    keep[ties] = True
    return keep.view_as(values)


def keep_n_of_m(scores: Tensor, count: int, run: int) -> Tensor:
    """Return a mask of the `count` largest of each `run` elements of a row; of equal ones the first."""
    runs = scores.reshape(-1, run)
    order = runs.sort(dim=1, descending=True, stable=True).indices
    keep = torch.zeros_like(runs, dtype=torch.bool).scatter_(1, order[:, :count], True)
    return keep.view_as(scores)


def block_scores(scores: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the mean score of every block of rows x columns."""
    high, wide = block
    rows, columns = scores.shape
    return scores.view(rows // high, high, columns // wide, wide).mean(dim=(1, 3))


def kept_blocks(keep: Tensor, block: tuple[int, int]) -> Tensor:
    """Return a mask of weights, given one of blocks."""
    return keep.repeat_interleave(block[0], dim=0).repeat_interleave(block[1], dim=1)


def threshold_of(parts: Sequence[Tensor], ratio: float, group: Group, *, device: torch.device) -> Tensor:
    """Return the smallest of the largest values that make up a share of all. Collective.

    It is found from counts of bit patterns, which have the order of the numbers that they stand for.

    Args:
        parts: float32 tensors of this rank, without negative numbers.
        ratio: share of all elements, of all ranks.
        group: the ranks that have other elements.
        device: device of the tensors.
    """
    values = torch.cat([torch.zeros(0, device=device), *(part.flatten() for part in parts)])
    patterns = values.view(torch.int32).to(torch.int64)
    total = all_reduce(torch.tensor([patterns.numel()], device=device), group)
    missing, prefix = max(1, round(ratio * int(total))), 0
    for low, width in _RUNS:
        runs = (patterns >> low & (2**width - 1)).to(torch.int64)
        counts = all_reduce(torch.bincount(runs, minlength=2**width), group)
        above = counts.flip(0).cumsum(0).flip(0)
        found = int((above >= missing).nonzero().max())
        missing -= int(above[found] - counts[found])
        prefix |= found << low
        patterns = patterns[runs == found]
    return torch.tensor(prefix, dtype=torch.int32, device=device).view(torch.float32)
