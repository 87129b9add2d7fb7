"""The base class of layers that add to a residual stream, with or without document ids."""

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
    """Base class of the layers between the embedding and the final norm.

    Args:
        norm: factory of a norm; every layer starts with one.
        dropout: dropout probability of each branch before it is added.
        residual_after_norm: take each residual after its norm (BERT's order).
        bias_dropout_add: adds a branch to the residual.
        return_hidden_only: return only hidden_SBD, without document ids (the last layer).

    Attributes:
        compiled: compiled function called instead of `block`; None: call `block`.
    """

    def __init__(
        self,
        *,
        norm: Callable[[], nn.Module],
        dropout: float = 0.0,
        residual_after_norm: bool = False,
        bias_dropout_add: BiasDropoutAdd = add_dropped,
        return_hidden_only: bool = False,
    ) -> None:
        super().__init__()
        self.norm1 = norm()
        self.dropout = dropout
        self.residual_after_norm = residual_after_norm
        self.bias_dropout_add = bias_dropout_add
        self.return_hidden_only = return_hidden_only
        self.compiled: Callable[[Tensor, Tensor | None], Tensor] | None = None

    def forward(self, inputs: Hidden) -> Hidden:
        """Return the output in the form of the input: `hidden_SBD` or `(hidden_SBD, document_ids_BS)`."""
        block = self.block if self.compiled is None else self.compiled
        if isinstance(inputs, Tensor):
            return block(inputs, None)
        hidden_SBD, document_ids_BS = inputs
        result_SBD = block(hidden_SBD, document_ids_BS)
        return result_SBD if self.return_hidden_only else (result_SBD, document_ids_BS)

    @abstractmethod
    def block(self, hidden_SBD: Tensor, document_ids_BS: Tensor | None) -> Tensor:
        """Return the residual stream with the layer's output added."""

    def _add(self, residual_SBD: Tensor, branch: tuple[Tensor, Tensor | None]) -> Tensor:
        output, bias = branch
        return self.bias_dropout_add(output, bias, residual_SBD, self.dropout, self.training)
