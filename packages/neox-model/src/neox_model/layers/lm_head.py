"""Compute logits, or directly the loss, from hidden states; gather logits over a split vocabulary.

Logits are [batch, sequence, vocabulary of this rank] (`logits_BSV`): the hidden states are transposed to
batch-first, which moves far less memory than transposing logits. Training and evaluation compute the loss
without storing all logits. A rank has ceil(vocabulary / ranks) columns; those beyond the vocabulary count as
minus infinity in the loss and are dropped by `gather_vocabulary`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_kernels.precision import widen
from neox_model.parallel.collectives import all_gather
from neox_model.parallel.cross_entropy import (
    LossOperator,
    projected_cross_entropy,
    vocab_parallel_cross_entropy,
)
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.logical import InitMethod, logical_parameter
from neox_model.parallel.sequence import to_column_parallel

__all__ = ["LMHead", "LMLoss", "compute_logits", "gather_vocabulary"]


def compute_logits(
    hidden_SBD: Tensor, weight_VD: Tensor, group: Group, *, scale: float = 1.0, softcap: float | None = None
) -> Tensor:
    """Return logits_BSV of this rank's part of the vocabulary: softcap * tanh(scale * product / softcap)."""
    return _logits(_scaled(to_column_parallel(hidden_SBD, group), scale), weight_VD, softcap)


def _scaled(hidden_SBD: Tensor, scale: float) -> Tensor:
    # Of the logits, which are linear: there are fewer hidden states.
    return hidden_SBD if scale == 1.0 else hidden_SBD * scale


def _logits(hidden_SBD: Tensor, weight_VD: Tensor, softcap: float | None) -> Tensor:
    logits_BSV = functional.linear(hidden_SBD.transpose(0, 1).contiguous(), weight_VD)
    if softcap is None:
        return logits_BSV
    return ((widen(logits_BSV) / softcap).tanh() * softcap).to(logits_BSV.dtype)


class LMHead(nn.Module):
    """Projects hidden states onto the vocabulary, without bias.

    Args:
        vocab_size: size of the logical vocabulary.
        hidden_size: model width.
        init: fills the weight.
        group: the ranks over which the vocabulary is split.
        scale: factor of the logits; `LMLoss` has its own.
        softcap: smooth limit of the logits; None: there is none. `LMLoss` has its own.
        weight: another layer's parameter (a tied head); None: create a parameter.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        init: InitMethod,
        group: Group = SINGLE_RANK,
        scale: float = 1.0,
        softcap: float | None = None,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.scale = scale
        self.softcap = softcap
        self.weight = (
            logical_parameter((vocab_size, hidden_size), init=init, group=group, split_dim=0, pad=True)
            if weight is None
            else weight
        )

    def forward(
        self,
        hidden_SBD: Tensor,
        targets: tuple[Tensor, Tensor] | None = None,
        loss: "LMLoss | None" = None,
    ) -> Tensor:
        """Return logits_BSV of this rank's part of the vocabulary; given `targets` and `loss`, the loss."""
        if targets is None or loss is None:
            return compute_logits(hidden_SBD, self.weight, self.group, scale=self.scale, softcap=self.softcap)
        return loss.of_hidden(to_column_parallel(hidden_SBD, self.group), self.weight, targets)


class LMLoss:
    """Cross entropy of a micro-batch: the weighted sum over its tokens.

    Called as `loss(logits_BSV, (labels_BS, loss_mask_BS))`; the mask has the weight of each token.

    Args:
        vocab_size: size of the logical vocabulary.
        group: the ranks over which the vocabulary is split; the call is collective over it.
        scale: factor of the logits in `of_hidden`.
        softcap: their smooth limit in `of_hidden`; None: there is none.
        z_loss: coefficient of the squared logarithms of the softmax's denominators. The gradient of the loss
            has this term, its value does not: it is compared with other losses.
        dtype: dtype in which the cross entropy is computed; None: float32.
        chunk_rows: tokens per chunk of logits in `of_hidden`; None chooses by the device.
        keeps_gradients: see `projected_cross_entropy`.
        operator: computes loss and gradient of a chunk of logits; None: PyTorch's operators.

    Attributes:
        z_terms: the term of `z_loss` of each micro-batch that was differentiated, on the device; clear it.
    """

    def __init__(
        self,
        vocab_size: int,
        group: Group = SINGLE_RANK,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
        z_loss: float = 0.0,
        dtype: torch.dtype | None = None,
        chunk_rows: int | None = None,
        keeps_gradients: bool = False,
        operator: LossOperator | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.group = group
        self.scale = scale
        self.softcap = softcap
        self.z_loss = z_loss
        self.z_terms: list[Tensor] = []
        self.dtype = dtype
        self.chunk_rows = chunk_rows
        self.keeps_gradients = keeps_gradients
        self.operator = operator

    def __call__(self, logits_BSV: Tensor, targets: tuple[Tensor, Tensor], *, share: float = 1.0) -> Tensor:
        """Return the loss, a float32 scalar; 0 if every token is masked.

        Args:
            logits_BSV: this rank's part.
            targets: labels_BS and loss_mask_BS.
            share: factor of the cross entropy, but not of the term of `z_loss`.
        """
        labels_BS, loss_mask_BS = targets
        losses_BS, log_totals_BS = vocab_parallel_cross_entropy(
            logits_BSV, labels_BS, vocab_size=self.vocab_size, group=self.group, dtype=self.dtype
        )
        loss = share * (widen(losses_BS) * loss_mask_BS).sum()
        if not self.z_loss or not loss.requires_grad:
            return loss
        term = self.z_loss * (widen(log_totals_BS).square() * loss_mask_BS).sum()
        self.z_terms.append(term.detach())
        return loss + (term - term.detach())

    def of_hidden(self, hidden_SBD: Tensor, weight_VD: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss from the hidden states of the whole sequence.

        Logits exist for a part of the tokens at a time. The hidden states' gradient is this rank's part.
        In float16 all logits are computed, because unscaled gradients would underflow.
        """
        device = hidden_SBD.device.type
        if torch.is_autocast_enabled(device):
            # Autocast does not affect functions that compute their own gradients.
            dtype = torch.get_autocast_dtype(device)
            hidden_SBD, weight_VD = hidden_SBD.to(dtype), weight_VD.to(dtype)
        hidden_SBD = _scaled(hidden_SBD, self.scale)
        if hidden_SBD.dtype == torch.float16:
            return self(_logits(hidden_SBD, weight_VD, self.softcap), targets)
        # Transpose the labels to the order of the hidden states, which moves less memory than the reverse.
        labels_SB, weights_SB = (target.t() for target in targets)
        return projected_cross_entropy(
            hidden_SBD.flatten(0, 1),
            weight_VD,
            labels_SB.reshape(-1),
            weights_SB.reshape(-1),
            vocab_size=self.vocab_size,
            group=self.group,
            chunk_rows=self.chunk_rows,
            keeps_gradients=self.keeps_gradients,
            operator=self.operator,
            softcap=self.softcap,
            z_loss=self.z_loss,
            z_terms=self.z_terms,
        )


def gather_vocabulary(logits_BSV: Tensor, group: Group, vocab_size: int) -> Tensor:
    """Return the first `vocab_size` logits of the whole vocabulary on every rank; no gradient.

    Pass the tokenizer's vocabulary size to exclude all padding. Collective over the group.
    """
    return all_gather(logits_BSV.detach(), group, dim=-1)[..., :vocab_size]
