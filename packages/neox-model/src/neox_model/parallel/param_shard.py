"""Where the master copy of a parameter is, and which rows of it a data-parallel rank has."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import Parameter

__all__ = ["ParamShard", "first_row"]


@dataclass(frozen=True, slots=True)
class ParamShard:
    """A run of one parameter's local elements, and the optimizer tensor with their master copy.

    Args:
        param: the model's parameter.
        start: first element of the run, row-major in the parameter's local tensor.
        numel: length of the run.
        holder: the optimizer's tensor; also the key of the optimizer's states.
        offset: first element of the run in `holder`, flat.
        local_shape: shape of the parameter's local tensor, before ZeRO partitions it.
    """

    param: Parameter
    start: int
    numel: int
    holder: Tensor
    offset: int
    local_shape: tuple[int, ...]


def first_row(rows: int, *, rank: int, size: int) -> int:
    """Return the first of the rows that a rank has if torch's `fully_shard` divides them over ranks.

    All ranks but the last ones have equally many; these may have fewer, or none.
    """
    return min(rows, rank * -(-rows // size))
