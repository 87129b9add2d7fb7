"""Where the master copy of a parameter is."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import Parameter

__all__ = ["Held"]


@dataclass(frozen=True, slots=True)
class Held:
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
