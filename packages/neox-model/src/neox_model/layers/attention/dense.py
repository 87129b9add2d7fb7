"""Global attention: every token sees all tokens before it and itself.

`DenseCore` is torch's scaled_dot_product_attention (flash attention where the device has it; its softmax is
float32). `SoftmaxCore` makes the scores itself and hands them to a softmax operator: the way where the
configuration asks for one of the fused softmax kernels, or for the scaling by layer that keeps float16
scores small.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_model.parallel.groups import SINGLE, Group
from neox_model.parallel.random import split_stream

__all__ = ["DenseCore", "SoftmaxCore", "hidden_keys"]


def hidden_keys(num_queries: int, num_keys: int, documents_BS: Tensor | None, device: torch.device) -> Tensor:
    """masked_out_B1ST: keys after the query (the last query sees all) or of another document."""
    query_S1 = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    is_later = torch.arange(num_keys, device=device) > query_S1
    if documents_BS is None:
        return is_later[None, None]
    is_foreign = documents_BS[:, -num_queries:].unsqueeze(2) != documents_BS.unsqueeze(1)
    return (is_later | is_foreign).unsqueeze(1)


class DenseCore(nn.Module):
    """softmax(query key^T / sqrt(head width)) value, through torch's own attention.

    Args:
        dropout: probability of dropping an attention weight.
        group: the ranks the heads are split over (their dropout differs).
    """

    def __init__(self, *, dropout: float = 0.0, group: Group = SINGLE) -> None:
        super().__init__()
        self.dropout = dropout
        self.group = group

    def forward(
        self, query_SBNK: Tensor, key_TBNK: Tensor, value_TBNK: Tensor, documents_BS: Tensor | None = None
    ) -> Tensor:
        """context_SBNK; with T > S the queries are the last S tokens."""
        num_queries, num_keys = query_SBNK.shape[0], key_TBNK.shape[0]
        is_square = num_queries == num_keys
        mask = None
        if documents_BS is not None or (not is_square and num_queries > 1):
            mask = ~hidden_keys(num_queries, num_keys, documents_BS, query_SBNK.device)
        dropout = self.dropout if self.training else 0.0
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBNK, key_TBNK, value_TBNK))
        causal = mask is None and is_square
        if dropout == 0.0:
            context = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)
        else:
            with split_stream(self.group, query.device):
                context = functional.scaled_dot_product_attention(query, key, value, mask, dropout, causal)
        return context.permute(2, 0, 1, 3)


class SoftmaxCore(nn.Module):
    """The same, from scores of its own and a softmax operator.

    Args:
        softmax: function of (scores_BNST, scale, masked_out_B1ST or None) that hides later keys itself and,
            where given, the masked-out ones; float32 inside.
        head_width: channels of a head.
        coefficient: scores are divided by it as they are made and multiplied inside the softmax (layer
            scaling).
        dropout: probability of dropping an attention weight.
        group: the ranks the heads are split over.
    """

    def __init__(
        self,
        *,
        softmax: Callable[[Tensor, float, Tensor | None], Tensor],
        head_width: int,
        coefficient: float = 1.0,
        dropout: float = 0.0,
        group: Group = SINGLE,
    ) -> None:
        super().__init__()
        self.softmax = softmax
        self.scale = head_width**-0.5 / coefficient
        self.coefficient = coefficient
        self.dropout = dropout
        self.group = group

    def forward(
        self, query_SBNK: Tensor, key_TBNK: Tensor, value_TBNK: Tensor, documents_BS: Tensor | None = None
    ) -> Tensor:
        """context_SBNK; with T > S the queries are the last S tokens."""
        num_queries, num_keys = query_SBNK.shape[0], key_TBNK.shape[0]
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBNK, key_TBNK, value_TBNK))
        scores_BNST = (query * self.scale) @ key.transpose(-1, -2)
        masked_out = None
        if documents_BS is not None or num_queries != num_keys:
            masked_out = hidden_keys(num_queries, num_keys, documents_BS, query.device)
        weights_BNST = self.softmax(scores_BNST, self.coefficient, masked_out)
        if self.training and self.dropout > 0.0:
            with split_stream(self.group, query.device):
                weights_BNST = functional.dropout(weights_BNST, self.dropout)
        return (weights_BNST @ value).permute(2, 0, 1, 3)
