"""Multiply a few rows by a large float32 weight on a CPU, with a copy of the weight in oneDNN's layout.

PyTorch's float32 products are made for many rows. For 2 to 64 rows, such as the newest tokens of a batch,
oneDNN takes half the time if the weight is in its own layout; for one row both are limited by reading the
weight, and for many rows PyTorch's product is faster.
"""

import torch
from torch import Tensor

from neox_model.torch_compat import has_packed_products, pack_weight, packed_product

__all__ = ["ROWS", "PackedWeight", "can_pack"]

# Numbers of rows for which the product is faster than torch.nn.functional.linear.
ROWS = range(2, 65)


def can_pack(weight: Tensor, *, rows: int) -> bool:
    """Return True if a product of this number of rows is faster with a packed weight.

    False also where PyTorch cannot pack it, and where autocast computes the product in another dtype.
    """
    return (
        rows in ROWS
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and has_packed_products()
    )


class PackedWeight:
    """A copy of a weight_OI for products with few rows. It does not follow later changes of the weight.

    Args:
        weight: the float32 weight, on the CPU.
        rows: the usual number of rows.
    """

    def __init__(self, weight: Tensor, *, rows: int) -> None:
        with torch.no_grad():
            self._weight = pack_weight(weight.detach(), rows)

    def product(self, inputs_RI: Tensor) -> Tensor:
        """Return inputs_RI @ weight_OI.T; no gradient."""
        return packed_product(inputs_RI, self._weight)
