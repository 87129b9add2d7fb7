"""The base class of layers that add to a residual stream, with or without document ids."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

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
        norm: factory of a norm.
        norm_placement: where a branch has a norm. before: on its input; after: on its output, before it is
            added, for which the branch must add its bias; both: on each.
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
        norm_placement: Literal["before", "after", "both"] = "before",
        dropout: float = 0.0,
        residual_after_norm: bool = False,
        bias_dropout_add: BiasDropoutAdd = add_dropped,
        return_hidden_only: bool = False,
    ) -> None:
        super().__init__()
        self.norm1 = None if norm_placement == "after" else norm()
        self.norm1_after = None if norm_placement == "before" else norm()
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

    def _enter(self, norm: nn.Module | None, hidden_SBD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream, and the input of a branch; without a norm they are the same."""
        if norm is None:
            return hidden_SBD, hidden_SBD
        both: tuple[Tensor, Tensor] = norm(hidden_SBD, returns_input=True)
        return both

    def _leave(
        self, norm: nn.Module | None, branch: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """Return what a branch adds: its output and bias, or its normalized output, which has the bias."""
        if norm is None:
            return branch
        output, bias = branch
        assert bias is None, "the branch adds its bias before the norm"
        return norm(output), None

    def _add(self, residual_SBD: Tensor, branch: tuple[Tensor, Tensor | None]) -> Tensor:
        output, bias = branch
        return self.bias_dropout_add(output, bias, residual_SBD, self.dropout, self.training)
