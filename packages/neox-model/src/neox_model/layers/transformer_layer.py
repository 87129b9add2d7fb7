"""One block: attention and MLP, each behind a norm and added to the residual stream."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from neox_model.layers.residual_layer import ResidualLayer

__all__ = ["TransformerLayer"]


class TransformerLayer(ResidualLayer):
    """x + attention(norm1(x)), then x + mlp(norm2(x)).

    Args:
        attention: makes the attention, called with (hidden_SBD, documents_BS or None, places_SB or None).
        mlp: makes the MLP, called with hidden_SBD; both give (output, bias still to be added or None).
        norm: makes a norm.
        parallel_residual: both branches start from x: x + attention(norm1(x)) + mlp(norm2(x)) (as GPT-J).
        options: what else a ResidualLayer takes.
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
        self, hidden_SBD: Tensor, documents_BS: Tensor | None, places_SB: Tensor | None = None
    ) -> Tensor:
        """Both branches added; `places_SB` says where the tokens are, if not one after another."""
        normed_SBD = self.norm1(hidden_SBD)
        attended = self.attention(normed_SBD, documents_BS, places_SB)
        if self.parallel_residual:
            middle_SBD = self._add(hidden_SBD, attended)
            return self._add(middle_SBD, self.mlp(self.norm2(hidden_SBD)))
        middle_SBD = self._add(normed_SBD if self.residual_after_norm else hidden_SBD, attended)
        normed_SBD = self.norm2(middle_SBD)
        residual_SBD = normed_SBD if self.residual_after_norm else middle_SBD
        return self._add(residual_SBD, self.mlp(normed_SBD))
