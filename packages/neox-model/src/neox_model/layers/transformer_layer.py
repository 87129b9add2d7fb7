"""The transformer layer: attention and MLP, each after a norm and added to the residual stream."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from neox_model.layers.residual_layer import ResidualLayer

__all__ = ["TransformerLayer"]


class TransformerLayer(ResidualLayer):
    """Computes x + attention(norm1(x)), then x + mlp(norm2(x)).

    Args:
        attention: factory of the attention, which is called with (hidden_SBD, document_ids_BS or None,
            position_ids_SB or None).
        mlp: factory of the MLP, which is called with hidden_SBD; both return (output, bias to add or None).
        norm: factory of a norm.
        parallel_residual: compute x + attention(norm1(x)) + mlp(norm2(x)), as in GPT-J.
        options: other arguments of ResidualLayer.
    """

    def __init__(
        self,
        *,
        attention: Callable[[], nn.Module],
        mlp: Callable[[], nn.Module],
        norm: Callable[[], nn.Module],
        parallel_residual: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(norm=norm, **options)
        self.attention = attention()
        self.norm2 = norm()
        self.mlp = mlp()
        self.parallel_residual = parallel_residual

    def block(
        self, hidden_SBD: Tensor, document_ids_BS: Tensor | None, position_ids_SB: Tensor | None = None
    ) -> Tensor:
        """Add both branches; `position_ids_SB` gives the positions of tokens that are not consecutive."""
        normed_SBD = self.norm1(hidden_SBD)
        attended = self.attention(normed_SBD, document_ids_BS, position_ids_SB)
        if self.parallel_residual:
            middle_SBD = self._add(hidden_SBD, attended)
            return self._add(middle_SBD, self.mlp(self.norm2(hidden_SBD)))
        middle_SBD = self._add(normed_SBD if self.residual_after_norm else hidden_SBD, attended)
        normed_SBD = self.norm2(middle_SBD)
        residual_SBD = normed_SBD if self.residual_after_norm else middle_SBD
        return self._add(residual_SBD, self.mlp(normed_SBD))
