"""Hidden states to logits, logits to the loss, and logits joined over a split vocabulary.

Logits are [batch, sequence, vocabulary of this rank] (`logits_BSV`), the same from the plain model and from a
pipeline's last stage: the hidden states are turned batch-first here, which moves far less than turning
logits, and labels are used as they come. This rank's columns are ceil(vocabulary / ranks) entries; those
beyond the vocabulary count as minus infinity in the loss and are dropped by `gather_vocabulary`.
"""

from torch import Tensor, nn
from torch.nn import functional

from neox_model.parallel.collectives import all_gather
from neox_model.parallel.cross_entropy import vocab_parallel_cross_entropy
from neox_model.parallel.groups import SINGLE, Group
from neox_model.parallel.logical import InitMethod, logical_parameter
from neox_model.parallel.sequence import enter_split

__all__ = ["LMHead", "LMLoss", "compute_logits", "gather_vocabulary"]


def compute_logits(hidden_SBD: Tensor, weight_VD: Tensor, group: Group) -> Tensor:
    """logits_BSV of this rank's part of the vocabulary."""
    hidden_BSD = enter_split(hidden_SBD, group).transpose(0, 1).contiguous()
    return functional.linear(hidden_BSD, weight_VD)


class LMHead(nn.Module):
    """The projection onto the vocabulary, without a bias.

    Args:
        vocab_size: entries of the logical vocabulary.
        hidden_size: model width.
        init: fills the weight.
        group: the ranks the vocabulary is split over.
        weight: another layer's parameter to use (a tied head); None for an own one.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        init: InitMethod,
        group: Group = SINGLE,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.weight = (
            logical_parameter((vocab_size, hidden_size), init=init, group=group, split_dim=0, pad=True)
            if weight is None
            else weight
        )

    def forward(self, hidden_SBD: Tensor) -> Tensor:
        """logits_BSV of this rank's part of the vocabulary."""
        return compute_logits(hidden_SBD, self.weight, self.group)


class LMLoss:
    """Mean cross entropy over a micro-batch's unmasked tokens.

    Called as `loss(logits_BSV, (labels_BS, loss_mask_BS))`.

    Args:
        vocab_size: entries of the logical vocabulary.
        group: the ranks the vocabulary is split over; the call is collective over it.
    """

    def __init__(self, vocab_size: int, group: Group = SINGLE) -> None:
        self.vocab_size = vocab_size
        self.group = group

    def __call__(self, logits_BSV: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        """The loss, a float32 scalar; 0 where every token is masked."""
        labels_BS, loss_mask_BS = targets
        weights_BS = loss_mask_BS.float()
        return (self.per_token(logits_BSV, labels_BS) * weights_BS).sum() / weights_BS.sum().clamp(min=1.0)

    def per_token(self, logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
        """Minus the logarithm of each label's probability, float32."""
        return vocab_parallel_cross_entropy(
            logits_BSV, labels_BS, vocab_size=self.vocab_size, group=self.group
        )


def gather_vocabulary(logits_BSV: Tensor, group: Group, vocab_size: int) -> Tensor:
    """The first `vocab_size` logits of the whole vocabulary, on every rank; no gradient.

    Pass the tokenizer's size to leave out all padding. Collective over the group.
    """
    return all_gather(logits_BSV.detach(), group, dim=-1)[..., :vocab_size]
