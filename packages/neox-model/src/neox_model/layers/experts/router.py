"""The router of experts: chooses the experts of each token, and their weights; counts and balances them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_kernels.custom_operator import custom_operator
from neox_model.parallel.collectives import all_reduce
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.linear import zero_init
from neox_model.parallel.logical import InitMethod, LogicalState, logical_parameter

__all__ = ["LOADS", "SCORES", "Balance", "Router", "sinkhorn"]

SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
}
# Largest scores of a group of experts that are summed. Source: arXiv:2405.04434; DeepSeek-V3's router.
_SUMMED: Mapping[str, int] = {"softmax": 1, "sigmoid": 2}
_SINKHORN_STEPS, _SINKHORN_TOLERANCE, _SINKHORN_EPSILON = 3, 1e-4, 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How experts are balanced in training.

    Attributes:
        sinkhorn: choose by `sinkhorn`.
        jitter: half of the width of the random factors' interval around 1; None: there are none.
        loss: coefficient of the balancing loss.
        over: a key of LOADS: the tokens whose experts that loss balances.
        z_loss: coefficient of the loss of the logits' size.
        accumulation: micro-batches per update, over which both are averaged.
    """

    sinkhorn: bool = False
    jitter: float | None = None
    loss: float = 0.0
    over: str = "sequence"
    z_loss: float = 0.0
    accumulation: int = 1


class Router(nn.Module):
    """Chooses the experts of each token, and their weights.

    It computes in float32. In a backward pass, which runs once however often the forward pass is computed
    again, it counts the tokens of each expert, and adds the gradients of the balancing losses.

    Args:
        hidden_size: width of the input.
        number: number of experts.
        chosen: experts of a token.
        scores: a key of SCORES.
        normalized: divide the weights of a token by their sum.
        scale: factor of the weights, after that.
        groups: groups of experts; 1: a token chooses among all.
        top_groups: groups among whose experts a token chooses.
        has_bias: add a number per expert to scores for the choice.
        has_logits_bias: add a weight per expert to the logits.
        balance: how experts are balanced.
        init: fills the weight.
        group: the tensor-parallel ranks; each computes a part of the gradient of the weight.

    Attributes:
        counts: tokens of each expert since `take_counts`, int64 [E].
        loss_scale: returns the loss scale of the backward pass, None without; the engine sets it.
        replicas: the data-parallel ranks; the engine sets them.
        by_position: the position of a token decides its experts, not its scores, so that runs can be compared
            whose rounding differs: of scores that are nearly equal, it decides which is larger.
    """

    def __init__(
        self,
        hidden_size: int,
        number: int,
        *,
        chosen: int,
        init: InitMethod,
        scores: str = "softmax",
        normalized: bool = False,
        scale: float = 1.0,
        groups: int = 1,
        top_groups: int = 1,
        has_bias: bool = False,
        has_logits_bias: bool = False,
        balance: Balance = Balance(),
        group: Group = SINGLE_RANK,
    ) -> None:
        super().__init__()
        self.number, self.chosen, self.normalized = number, chosen, normalized
        self.scale, self.groups, self.top_groups = scale, groups, top_groups
        self.scores, self.summed = SCORES[scores], _SUMMED[scores]
        self.balance = balance
        self.group = group
        parameter = partial(logical_parameter, group=group, is_partial=True)
        self.weight = parameter((number, hidden_size), init=init)
        self.logits_bias = parameter((number,), init=zero_init) if has_logits_bias else None
        self.counts: Tensor
        self.register_buffer("counts", torch.zeros(number, dtype=torch.int64), persistent=False)
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(number) if has_bias else None, persistent=False)
        self.loss_scale: Callable[[], Tensor | float | None] = lambda: None
        self.replicas = SINGLE_RANK
        self.by_position = False

    def forward(self, hidden_SBD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights and numbers of each token's experts [T, K], and the experts' tokens [E]."""
        dtype = torch.promote_types(hidden_SBD.dtype, torch.float32)
        with torch.autocast(hidden_SBD.device.type, enabled=False):
            inputs_SBD = hidden_SBD.to(dtype)
            if self.training and self.balance.jitter is not None:
                jitter = self.balance.jitter
                inputs_SBD = inputs_SBD * torch.empty_like(inputs_SBD).uniform_(1.0 - jitter, 1.0 + jitter)
            bias_E = None if self.logits_bias is None else self.logits_bias.to(dtype)
            logits_SBE = functional.linear(inputs_SBD, self.weight.to(dtype), bias_E)
            experts_SBK = self._choose(logits_SBE.detach())
            places_BE = experts_SBK.transpose(0, 1).flatten(1)
            counts_BE = places_BE.new_zeros(len(places_BE), self.number)
            counts_BE.scatter_add_(1, places_BE, torch.ones_like(places_BE))
            if self.training and torch.is_grad_enabled() and not logits_SBE.requires_grad:
                # Nothing before them is trained, but the backward pass counts.
                logits_SBE.requires_grad_()
            scores_SBE = self.scores(logits_SBE)
            weights_SBK = scores_SBE.gather(-1, experts_SBK)
            if self.normalized:
                weights_SBK = weights_SBK / weights_SBK.sum(dim=-1, keepdim=True)
            weights_SBK = weights_SBK * self.scale
            if self.training and weights_SBK.requires_grad:
                weights_SBK = _Observed.apply(
                    weights_SBK, *self._balanced(logits_SBE, scores_SBE), counts_BE, self.counts, self
                )
        return weights_SBK.flatten(0, 1), experts_SBK.flatten(0, 1), counts_BE.sum(dim=0)

    @torch.no_grad()
    def _choose(self, logits_SBE: Tensor) -> Tensor:
        if self.by_position:
            length, batch, _ = logits_SBE.shape
            places_SK = torch.arange(length * self.chosen, device=logits_SBE.device).view(length, -1)
            return (places_SK % self.number).unsqueeze(1).expand(-1, batch, -1)
        if self.training and self.balance.sinkhorn:
            scores_SBE = sinkhorn(logits_SBE.flatten(0, 1)).view_as(logits_SBE)
        else:
            scores_SBE = self.scores(logits_SBE)
        if self.bias is not None:
            scores_SBE = scores_SBE + self.bias
        if self.groups > 1:
            scores_SBGE = scores_SBE.unflatten(-1, (self.groups, -1))
            scores_SBG = scores_SBGE.topk(self.summed, dim=-1).values.sum(dim=-1)
            others_SBG = torch.ones_like(scores_SBG, dtype=torch.bool)
            others_SBG.scatter_(-1, scores_SBG.topk(self.top_groups, dim=-1).indices, False)
            scores_SBE = scores_SBGE.masked_fill(others_SBG.unsqueeze(-1), float("-inf")).flatten(-2)
        return scores_SBE.topk(self.chosen, dim=-1).indices

    def _balanced(self, logits_SBE: Tensor, scores_SBE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return each sequence's mean shares of scores, and the logits' size; None for what has no loss."""
        shares_BE = size = None
        if self.balance.loss:
            shares_BE = (scores_SBE / scores_SBE.sum(dim=-1, keepdim=True)).mean(dim=0)
        if self.balance.z_loss:
            size = logits_SBE.logsumexp(dim=-1).square().mean()
        return shares_BE, size

    def balance_gradients(self, counts_BE: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return this rank's part of the gradients of `_balanced`'s values.

        Collective over the replicas if the batch is balanced.
        """
        balance, scale, of_shares, of_size = self.balance, self.loss_scale(), None, None
        part = counts_BE.new_full((), 1.0 / (balance.accumulation * self.group.size), dtype=dtype)
        if scale is not None:
            part = part * scale
        if balance.loss:
            loads = LOADS[balance.over](self, counts_BE)
            loads = loads * part / loads.sum(dim=-1, keepdim=True)
            of_shares = (loads * (balance.loss * self.number / len(counts_BE))).expand(counts_BE.shape)
        if balance.z_loss:
            of_size = part * balance.z_loss
        return of_shares, of_size

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Move the bias with the module, and keep it in float32, of which its small changes have need."""
        bias = self.bias
        super()._apply(fn, recurse)
        if bias is not None and self.bias is not None:
            self.bias = bias.to(self.bias.device)
        return self

    def take_counts(self) -> Tensor:
        """Return the tokens of each expert since the last call."""
        counts = self.counts.clone()
        self.counts.zero_()
        return counts

    @torch.no_grad()
    def move_bias(self, counts: Tensor, step: Tensor | float) -> None:
        """Raise the bias of experts with few tokens, and lower that of others; the mean stays 0.

        Args:
            counts: tokens of each expert in the update, over all ranks.
            step: change of a bias, before the mean is subtracted.

        Source: arXiv:2408.15664.
        """
        if self.bias is not None:
            counts = counts.to(self.bias.dtype)
            change = (counts.mean() - counts).sign()
            self.bias += step * (change - change.mean())

    def logical_states(self, name: str) -> list[LogicalState]:
        """Return the bias, if there is one, given the logical name of this module."""
        if self.bias is None:
            return []
        return [
            LogicalState(
                name=f"{name}/bias",
                shape=(self.number,),
                slices=((0, self.number),),
                start=0,
                values=self.bias,
                is_split_over_model=False,
            )
        ]


# What a balancing loss balances -> (router, experts' tokens by sequence [B, E]) -> their sums [B or 1, E].
# Those of the batch are the update's up to this micro-batch, of all replicas.
LOADS: Mapping[str, Callable[[Router, Tensor], Tensor]] = {
    "sequence": lambda router, counts_BE: counts_BE,
    "micro_batch": lambda router, counts_BE: counts_BE.sum(dim=0, keepdim=True),
    "batch": lambda router, counts_BE: all_reduce(router.counts.clone(), router.replicas).unsqueeze(0),
}


@custom_operator("neox_model::add_after", mutates_args=("total",))
def _add_after(total: Tensor, counts: Tensor, gradient: Tensor) -> None:
    """Add counts in a backward pass: torch.compile would compute the sum in the forward pass.

    Other micro-batches change the total between the two. It cannot do so for an operator that has a gradient
    among its arguments.
    """
    total.add_(counts)


_add_after.register_fake(lambda total, counts, gradient: None)


class _Observed(torch.autograd.Function):
    """Returns the weights; the backward pass counts the tokens of experts, and begins the balancing losses.

    A backward pass runs once for a micro-batch, also of layers whose forward pass is recomputed, and those of
    an update run in the order of its micro-batches, also in pipelines.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        shares: Tensor | None,
        size: Tensor | None,
        counts: Tensor,
        total: Tensor,
        router: Router,
    ) -> Tensor:
        ctx.save_for_backward(counts)
        # Not saved, because other micro-batches change it before the backward pass of this one.
        ctx.total, ctx.router = total, router
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, of_weights: Tensor) -> tuple[Tensor | None, ...]:
        (counts,) = ctx.saved_tensors
        _add_after(ctx.total, counts.sum(dim=0), of_weights)
        return of_weights, *ctx.router.balance_gradients(counts, of_weights.dtype), None, None, None


def sinkhorn(logits_TE: Tensor) -> Tensor:
    """Return scores that are balanced over experts, and over tokens.

    Up to three steps: it ends when the factors of experts change by less than 1e-4, as in GPT-NeoX.

    Source: arXiv:2202.01169; GPT-NeoX's router.
    """
    costs_TE = logits_TE.exp()
    tokens, experts = costs_TE.shape
    of_tokens, of_experts = costs_TE.new_ones(tokens), 1.0 / (experts * costs_TE.sum(dim=0))
    is_done = torch.zeros((), dtype=torch.bool, device=costs_TE.device)
    for _ in range(_SINKHORN_STEPS):
        rows = 1.0 / (tokens * ((costs_TE * of_experts).sum(dim=1) + _SINKHORN_EPSILON))
        columns = 1.0 / (experts * ((costs_TE * rows.unsqueeze(1)).sum(dim=0) + _SINKHORN_EPSILON))
        change = (of_experts - columns).abs().mean()
        # Without a condition on the host, which would wait for the device.
        of_tokens = torch.where(is_done, of_tokens, rows)
        of_experts = torch.where(is_done, of_experts, columns)
        is_done = is_done | (change < _SINKHORN_TOLERANCE)
    return of_experts * costs_TE * of_tokens.unsqueeze(1)
