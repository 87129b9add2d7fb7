"""What optimizers compute of whole weights, of which ranks have parts.

Tensor-parallel ranks split some weights along one dimension. With ZeRO, data-parallel ranks (the row group)
divide the rows of all weights, or of such parts of them.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ReduceOp

from neox_model.parallel.collectives import all_gather, all_reduce
from neox_model.parallel.gradient_reduction import in_buckets
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.logical import split_dim_of

__all__ = ["joined_maxima_", "whole_norms", "whole_weight"]


def whole_norms(
    weights: Sequence[Tensor], norms: Tensor, model_group: Group, row_group: Group = SINGLE_RANK
) -> Tensor:
    """Return 2-norms over whole weights, given those over what this rank holds. Collective.

    Args:
        weights: each knows whether it is split; in the same order on each rank.
        norms: for each weight a row of norms.
        model_group: the tensor-parallel ranks.
        row_group: the ranks that divide the rows of all weights.
    """
    whole = norms if row_group.size == 1 else _joined_norms(norms, row_group)
    split = [row for row, weight in enumerate(weights) if split_dim_of(weight) is not None]
    if not split:
        return whole
    whole = whole.clone()
    whole[split] = _joined_norms(whole[split], model_group)
    return whole


def _joined_norms(norms: Tensor, group: Group) -> Tensor:
    """Return the roots of the sums of the squares over the ranks. Collective.

    They are summed in the order of the ranks: that of a reduction depends on the position among all the
    norms, so copies of a weight on different pipeline stages would differ.
    """
    return all_gather(norms.square().unsqueeze(0), group, dim=0).sum(dim=0).sqrt()


def joined_maxima_(tensors: Sequence[Tensor], group: Group) -> None:
    """Replace the elements of tensors by their maximum over the ranks. Collective, unless they are empty.

    Args:
        tensors: of the same shapes on each rank.
        group: the ranks.
    """
    if group.size > 1:
        held = [tensor for tensor in tensors if tensor.numel()]
        in_buckets(held, lambda flat: all_reduce(flat, group, ReduceOp.MAX))


def whole_weight(part: Tensor, dim: int, group: Group) -> Tensor:
    """Return the whole of what the tensor-parallel ranks hold equal parts of. Collective.

    Args:
        part: this rank's part.
        dim: the dimension that is split.
        group: the tensor-parallel ranks.
    """
    return all_gather(part, group, dim)
