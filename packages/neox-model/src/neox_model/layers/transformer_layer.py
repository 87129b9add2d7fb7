"""One block: attention and MLP, each behind a norm and added to the residual stream."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

__all__ = ["TransformerLayer", "add_dropped"]

# (x, bias or None, residual, probability, training) -> residual + dropout(x + bias)
BiasDropoutAdd = Callable[[Tensor, Tensor | None, Tensor, float, bool], Tensor]
Hidden = Tensor | tuple[Tensor, Tensor]


def add_dropped(
    x: Tensor, bias: Tensor | None, residual: Tensor, probability: float, training: bool
) -> Tensor:
    """Add dropout(x + bias) to the residual, with torch's own operators."""
    x = x if bias is None else x + bias
    return residual + functional.dropout(x, probability, training)


class TransformerLayer(nn.Module):
    """x + attention(norm1(x)), then x + mlp(norm2(x)).

    Args:
        attention: makes the attention, called with (hidden_SBD, documents_BS or None, places_SB or None).
        mlp: makes the MLP, called with hidden_SBD; both give (output, bias still to be added or None).
        norm: makes a norm.
        dropout: probability, on each branch before it is added.
        parallel_residual: both branches start from x: x + attention(norm1(x)) + mlp(norm2(x)) (as GPT-J).
        residual_after_norm: each residual is taken after its norm (BERT's order).
        bias_dropout_add: how a branch is added.
        ends_documents: give hidden_SBD alone, whatever came in: the last layer does, for what follows it.
    """

    def __init__(
        self,
        *,
        attention: Callable[[], nn.Module],
        mlp: Callable[[], nn.Module],
        norm: Callable[[], nn.Module],
        dropout: float = 0.0,
        parallel_residual: bool = False,
        residual_after_norm: bool = False,
        bias_dropout_add: BiasDropoutAdd = add_dropped,
        ends_documents: bool = False,
    ) -> None:
        super().__init__()
        self.norm1 = norm()
        self.attention = attention()
        self.norm2 = norm()
        self.mlp = mlp()
        self.dropout = dropout
        self.parallel_residual = parallel_residual
        self.residual_after_norm = residual_after_norm
        self.bias_dropout_add = bias_dropout_add
        self.ends_documents = ends_documents

    def forward(self, inputs: Hidden) -> Hidden:
        """The block's output, in the form of its input: `hidden_SBD` or `(hidden_SBD, documents_BS)`."""
        if isinstance(inputs, Tensor):
            return self._block(inputs, None)
        hidden_SBD, documents_BS = inputs
        result_SBD = self._block(hidden_SBD, documents_BS)
        return result_SBD if self.ends_documents else (result_SBD, documents_BS)

    def _block(
        self, hidden_SBD: Tensor, documents_BS: Tensor | None, places_SB: Tensor | None = None
    ) -> Tensor:
        normed_SBD = self.norm1(hidden_SBD)
        attended = self.attention(normed_SBD, documents_BS, places_SB)
        if self.parallel_residual:
            middle_SBD = self._add(hidden_SBD, attended)
            return self._add(middle_SBD, self.mlp(self.norm2(hidden_SBD)))
        middle_SBD = self._add(normed_SBD if self.residual_after_norm else hidden_SBD, attended)
        normed_SBD = self.norm2(middle_SBD)
        residual_SBD = normed_SBD if self.residual_after_norm else middle_SBD
        return self._add(residual_SBD, self.mlp(normed_SBD))

    def _add(self, residual_SBD: Tensor, branch: tuple[Tensor, Tensor | None]) -> Tensor:
        output, bias = branch
        return self.bias_dropout_add(output, bias, residual_SBD, self.dropout, self.training)
