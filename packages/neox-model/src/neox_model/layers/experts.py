"""Mixture of experts: a router sends each token to a few feed-forward blocks, and adds their outputs.

All experts' matrices of one kind are one logical tensor [experts, inputs, outputs]. Rows of tokens are sorted
by expert, so that each expert's product is over consecutive rows, and no token is dropped. Tensor-parallel
ranks split the width of every expert. Each of them routes the whole sequence, and computes a part of the
gradient of the router, because it has a part of the experts' outputs.

Sources: arXiv:1701.06538; arXiv:2211.15841 (without dropped tokens).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.logical import InitMethod, LogicalState, logical_parameter
from neox_model.parallel.partial_gradients import has_partial_gradient, mark_partial
from neox_model.parallel.sequence import TPInput, from_row_parallel, gather_input

__all__ = ["SCORES", "Balance", "Experts", "Router", "grouped_product", "looped_product", "sinkhorn"]

# (rows [R, I] sorted by expert, weights [E, I, O], rows of each expert [E]) -> [R, O]
ExpertProduct = Callable[[Tensor, Tensor, Tensor], Tensor]

SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
}
_SINKHORN_STEPS, _SINKHORN_TOLERANCE, _SINKHORN_EPSILON = 3, 1e-4, 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How experts are balanced in training.

    Attributes:
        sinkhorn: choose by `sinkhorn`.
        jitter: half of the width of the random factors' interval around 1; None: there are none.
        loss: coefficient of the loss of each sequence.
        z_loss: coefficient of the loss of the logits' size.
        accumulation: micro-batches per update, over which both are averaged.
    """

    sinkhorn: bool = False
    jitter: float | None = None
    loss: float = 0.0
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
        has_bias: add a number per expert to scores for the choice.
        balance: how experts are balanced.
        init: fills the weight.
        group: the tensor-parallel ranks; each computes a part of the gradient of the weight.

    Attributes:
        counts: tokens of each expert since `take_counts`, int64 [E].
        loss_scale: returns the loss scale of the backward pass, None without; the engine sets it.
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
        has_bias: bool = False,
        balance: Balance = Balance(),
        group: Group = SINGLE_RANK,
    ) -> None:
        super().__init__()
        self.number, self.chosen, self.normalized = number, chosen, normalized
        self.scores = SCORES[scores]
        self.balance = balance
        self.group = group
        self.weight = _partial_parameter((number, hidden_size), init, group)
        self.counts: Tensor
        self.register_buffer("counts", torch.zeros(number, dtype=torch.int64), persistent=False)
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(number) if has_bias else None, persistent=False)
        self.loss_scale: Callable[[], Tensor | float | None] = lambda: None

    def forward(self, hidden_SBD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights and numbers of each token's experts [T, K], and the experts' tokens [E]."""
        dtype = torch.promote_types(hidden_SBD.dtype, torch.float32)
        with torch.autocast(hidden_SBD.device.type, enabled=False):
            inputs_SBD = hidden_SBD.to(dtype)
            if self.training and self.balance.jitter is not None:
                jitter = self.balance.jitter
                inputs_SBD = inputs_SBD * torch.empty_like(inputs_SBD).uniform_(1.0 - jitter, 1.0 + jitter)
            logits_SBE = functional.linear(inputs_SBD, self.weight.to(dtype))
            experts_SBK = self._choose(logits_SBE.detach())
            places_BE = experts_SBK.transpose(0, 1).flatten(1)
            counts_BE = places_BE.new_zeros(len(places_BE), self.number)
            counts_BE.scatter_add_(1, places_BE, torch.ones_like(places_BE))
            if self.training and logits_SBE.requires_grad:
                gradient = self._gradient(logits_SBE.detach(), counts_BE)
                logits_SBE = _Observed.apply(logits_SBE, gradient, counts_BE.sum(dim=0), self)
            weights_SBK = self.scores(logits_SBE).gather(-1, experts_SBK)
            if self.normalized:
                weights_SBK = weights_SBK / weights_SBK.sum(dim=-1, keepdim=True)
        return weights_SBK.flatten(0, 1), experts_SBK.flatten(0, 1), counts_BE.sum(dim=0)

    @torch.no_grad()
    def _choose(self, logits_SBE: Tensor) -> Tensor:
        if self.training and self.balance.sinkhorn:
            scores_SBE = sinkhorn(logits_SBE.flatten(0, 1)).view_as(logits_SBE)
        else:
            scores_SBE = self.scores(logits_SBE)
        if self.bias is not None:
            scores_SBE = scores_SBE + self.bias
        return scores_SBE.topk(self.chosen, dim=-1).indices

    @torch.enable_grad()
    def _gradient(self, logits_SBE: Tensor, counts_BE: Tensor) -> Tensor | None:
        """Return this rank's part of the gradient of the balancing losses; None if there are none."""
        if not self.balance.loss and not self.balance.z_loss:
            return None
        logits_SBE.requires_grad_()
        total = logits_SBE.new_zeros(())
        if self.balance.loss:
            scores_SBE = self.scores(logits_SBE)
            shares_BE = (scores_SBE / scores_SBE.sum(dim=-1, keepdim=True)).mean(dim=0)
            loads_BE = counts_BE * (self.number / (self.chosen * len(logits_SBE)))
            total = total + self.balance.loss * (shares_BE * loads_BE).sum(dim=-1).mean()
        if self.balance.z_loss:
            total = total + self.balance.z_loss * logits_SBE.logsumexp(dim=-1).square().mean()
        (gradient,) = torch.autograd.grad(total / (self.balance.accumulation * self.group.size), logits_SBE)
        return gradient

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


class _Observed(torch.autograd.Function):
    """Returns the logits; the backward pass counts the tokens of experts, and adds a gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, gradient: Tensor | None, counts: Tensor, router: Router) -> Tensor:
        ctx.save_for_backward(gradient, counts)
        ctx.router = router
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, of_logits: Tensor) -> tuple[Tensor, None, None, None]:
        gradient, counts = ctx.saved_tensors
        ctx.router.counts += counts
        if gradient is not None:
            scale = ctx.router.loss_scale()
            of_logits = of_logits + (gradient if scale is None else gradient * scale)
        return of_logits, None, None, None


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class _ByExpert(torch.autograd.Function):
    """Repeats the row of each token for its experts, sorted by expert; the backward pass sums them."""

    @staticmethod
    def forward(ctx: Any, tokens_TD: Tensor, order_R: Tensor, places_TK: Tensor) -> Tensor:
        ctx.save_for_backward(places_TK)
        return tokens_TD[order_R // places_TK.shape[1]]

    @staticmethod
    def backward(ctx: Any, of_rows: Tensor) -> tuple[Tensor, None, None]:
        (places_TK,) = ctx.saved_tensors
        return of_rows[places_TK].sum(dim=1), None, None


class Experts(nn.Module):
    """Computes the sum over a token's experts of weight * down(activation(up(x))); gated ones as GatedMLP.

    Args:
        hidden_size: width of input and output.
        width: width between the projections of an expert.
        router: factory of the router.
        activation: elementwise activation, of the gate if there is one.
        is_gated: experts have a second input projection, the gate.
        product: computes products with the matrices of all experts.
        shared: factory of an MLP for all tokens, whose output is added; None: there is none.
        has_shared_gate: multiply that output by the sigmoid of a projection of the input.
        init: fills `up`, `gate` and the projection for the shared expert's gate.
        output_init: fills `down`.
        group: the ranks over which each expert's width is split.
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        *,
        router: Callable[[], Router],
        activation: Callable[[Tensor], Tensor],
        init: InitMethod,
        output_init: InitMethod,
        is_gated: bool = False,
        product: ExpertProduct | None = None,
        shared: Callable[[], nn.Module] | None = None,
        has_shared_gate: bool = False,
        group: Group = SINGLE_RANK,
    ) -> None:
        super().__init__()
        self.activation, self.group = activation, group
        self.product = looped_product if product is None else product
        self.router = router()
        wide, number = (self.router.number, hidden_size, width), self.router.number
        self.up = logical_parameter(wide, init=init, group=group, split_dim=2)
        self.gate = logical_parameter(wide, init=init, group=group, split_dim=2) if is_gated else None
        self.down = logical_parameter(
            (number, width, hidden_size), init=output_init, group=group, split_dim=1
        )
        self.shared = None if shared is None else shared()
        self.shared_gate = _partial_parameter((1, hidden_size), init, group) if has_shared_gate else None

    def forward(self, hidden_SBD: Tensor, tp_input: TPInput | None = None) -> tuple[Tensor, None]:
        """Return the output; `tp_input` as in ParallelAttention. There is no bias to add."""
        if tp_input is None:
            tp_input = gather_input(hidden_SBD, self.group)
            hidden_SBD = tp_input.whole
        weights_TK, experts_TK, counts_E = self.router(hidden_SBD)
        order_R = experts_TK.flatten().argsort(stable=True)
        places_R = torch.empty_like(order_R)
        places_R[order_R] = torch.arange(len(order_R), device=order_R.device)
        places_TK = places_R.view_as(experts_TK)
        rows_RD = self._computed(_ByExpert.apply(hidden_SBD.flatten(0, 1), order_R, places_TK), counts_E)
        sum_TD = (rows_RD[places_TK] * weights_TK.unsqueeze(-1).to(rows_RD.dtype)).sum(dim=1)
        output_SBD = sum_TD.unflatten(0, hidden_SBD.shape[:2])
        if self.shared is not None:
            output_SBD = output_SBD + self._shared(self.shared, hidden_SBD, tp_input)
        return from_row_parallel(output_SBD, self.group) if tp_input.reduces else output_SBD, None

    def _computed(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Return the output of each row's expert; this rank's part of the sum over its width."""
        up_RF = self.product(rows_RD, self.up, counts_E)
        if self.gate is None:
            return self.product(self.activation(up_RF), self.down, counts_E)
        gated_RF = up_RF * self.activation(self.product(rows_RD, self.gate, counts_E))
        return self.product(gated_RF, self.down, counts_E)

    def _shared(self, shared: nn.Module, hidden_SBD: Tensor, tp_input: TPInput) -> Tensor:
        reduces, tp_input.reduces = tp_input.reduces, False
        output_SBD: Tensor = shared(hidden_SBD, tp_input)[0]
        tp_input.reduces = reduces
        if self.shared_gate is None:
            return output_SBD
        gate = functional.linear(hidden_SBD, self.shared_gate.to(hidden_SBD.dtype))
        return output_SBD * torch.sigmoid(gate).to(output_SBD.dtype)


def _partial_parameter(shape: tuple[int, ...], init: InitMethod, group: Group) -> nn.Parameter:
    """Return a parameter of which each tensor-parallel rank computes a part of the gradient."""
    parameter = logical_parameter(shape, init=init, group=group)
    if group.size > 1 and not has_partial_gradient(parameter):
        mark_partial(parameter, group)
    return parameter


def grouped_product(rows_RI: Tensor, weight_EIO: Tensor, counts_E: Tensor) -> Tensor:
    """Return the product of each row with its expert's matrix, in one operator.

    It requires widths of a multiple of 16 bytes. No row is behind the last expert's, where the operator would
    return memory as it is.

    Args:
        rows_RI: rows sorted by expert.
        weight_EIO: the experts' matrices.
        counts_E: number of rows of each expert; their sum is R.
    """
    ends_E = counts_E.cumsum(0).to(torch.int32)
    product: Tensor = functional.grouped_mm(rows_RI, weight_EIO, offs=ends_E)
    # The operator's backward pass refuses gradients that are not contiguous.
    found: Tensor = _ContiguousGradient.apply(product)
    return found


def looped_product(rows_RI: Tensor, weight_EIO: Tensor, counts_E: Tensor) -> Tensor:
    """Return the same as `grouped_product`, one expert after the other; the host waits for the counts."""
    parts = zip(rows_RI.split(counts_E.tolist()), weight_EIO.unbind(), strict=True)
    return torch.cat([part @ matrix for part, matrix in parts])


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
