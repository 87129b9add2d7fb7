"""What every layer of the stack has: a stream of hidden states that it adds to, with or without documents."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from neox_model.parallel.sequence import BiasDropoutAdd

__all__ = ["Hidden", "ResidualLayer", "add_dropped"]

Hidden = Tensor | tuple[Tensor, Tensor]


def add_dropped(
    x: Tensor, bias: Tensor | None, residual: Tensor, probability: float, training: bool
) -> Tensor:
    """Add dropout(x + bias) to the residual, with torch's own operators."""
    x = x if bias is None else x + bias
    return residual + functional.dropout(x, probability, training)


class ResidualLayer(nn.Module, ABC):
    """Base of the layers between the embedding and the last norm.

    Args:
        norm: makes a norm; the first part of every layer is one.
        dropout: probability, on each branch before it is added.
        residual_after_norm: each residual is taken after its norm (BERT's order).
        bias_dropout_add: how a branch is added.
        ends_documents: give hidden_SBD alone, whatever came in: the last layer does, for what follows it.

    Attributes:
        compiled: called in the place of `block`; None: that one is.
    """

    def __init__(
        self,
        *,
        norm: Callable[[], nn.Module],
        dropout: float = 0.0,
        residual_after_norm: bool = False,
        bias_dropout_add: BiasDropoutAdd = add_dropped,
        ends_documents: bool = False,
    ) -> None:
        super().__init__()
        self.norm1 = norm()
        self.dropout = dropout
        self.residual_after_norm = residual_after_norm
        self.bias_dropout_add = bias_dropout_add
        self.ends_documents = ends_documents
        self.compiled: Callable[[Tensor, Tensor | None], Tensor] | None = None

    def forward(self, inputs: Hidden) -> Hidden:
        """The layer's output, in the form of its input: `hidden_SBD` or `(hidden_SBD, documents_BS)`."""
        block = self.block if self.compiled is None else self.compiled
        if isinstance(inputs, Tensor):
            return block(inputs, None)
        hidden_SBD, documents_BS = inputs
        result_SBD = block(hidden_SBD, documents_BS)
        return result_SBD if self.ends_documents else (result_SBD, documents_BS)

    @abstractmethod
    def block(self, hidden_SBD: Tensor, documents_BS: Tensor | None) -> Tensor:
        """The stream with all that the layer adds to it."""

    def _add(self, residual_SBD: Tensor, branch: tuple[Tensor, Tensor | None]) -> Tensor:
        output, bias = branch
        return self.bias_dropout_add(output, bias, residual_SBD, self.dropout, self.training)
