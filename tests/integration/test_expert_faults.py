"""Faults of mixtures of experts, planted in the run of `verify-layout` on a layout: each is found.

They are those that users of other frameworks have reported: nearly all change a run without an error.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from neox_launcher.protocol.layout_verification import LayoutAnswer
from neox_launcher.verify_layout.verify import LayoutVerification, case_of
from neox_model.parallel.collectives import all_reduce
from neox_model.parallel.groups import SINGLE_RANK
from support.distributed import run_ranks
from support.layout_answers import answer_of_ranks, arguments_of, rank_answer
from support.layout_faults import Fault, differing, first_argument, nothing, on_rank, rank, times
from support.settings import TINY

# Another number than that of any width.
_NUMBER = 6
_SETTINGS = TINY | {
    "engine": "torch",
    "num_layers": 2,
    "pos_emb": "rotary",
    "activation": "swiglu",
    "moe_num_experts": _NUMBER,
    "moe_top_k": 2,
    "moe_expert_width": 16,
    "moe_router_type": "topk",
    "moe_balance_loss": 0.1,
    "moe_router_z_loss": 0.05,
    "moe_expert_bias": True,
    "moe_expert_bias_rate": 0.1,
    "gradient_clipping": 0.1,
    "gradient_accumulation_steps": 3,
}
_EXPERTS = "neox_model.layers.experts"
_GROUPS = "neox_model.parallel.groups.Groups.copies_of"
_REDUCTION = "neox_model.parallel.gradient_reduction.GradientReduction.__call__"
_NORM = "neox_model.optim.mixed_precision.global_gradient_norm"
_RECOMPUTED = {"checkpoint_activations": True, "checkpoint_num_layers": 1}


def over_all_replicas(original: Any) -> Any:
    return lambda self, *, is_expert: self.data


def sums_over_experts_ranks(original: Any) -> Any:
    """The mean over copies is not divided by the ranks that divide the experts."""
    return lambda self, gradients: original(replace(self, divisor=self.group.size), gradients)


def takes_sums_over_experts_ranks(original: Any) -> Any:
    def take(self: Any) -> None:
        self._experts = 1
        original(self)

    return take


def own_experts_gradients(original: Any) -> Any:
    def reduce(self: Any, gradients: Any) -> None:
        if self.divisor is not None:
            self = replace(self, group=SINGLE_RANK, divisor=self.divisor // self.group.size)
        original(self, gradients)

    return reduce


def norm_over(**groups: Any) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def norm(parameters: Any, gradients: Any, given: Any, *, are_sharded: bool = False) -> Any:
            return original(parameters, gradients, replace(given, **groups), are_sharded=are_sharded)

        return norm

    return make


def counts_experts_on_all_replicas(original: Any) -> Any:
    """The squares of experts that have copies are added once for each copy."""
    return lambda parameters, gradients, groups, *, are_sharded=False: original(
        parameters, gradients, replace(groups, experts=groups.data), are_sharded=are_sharded
    )


def without_gradient_back(original: Any) -> Any:
    """The gradients of rows stay where the rows were sent from."""

    def exchange(rows: Any, group: Any, sent: Any, received: Any) -> Any:
        arrived = original(rows.detach(), group, sent, received)
        return arrived + 0.0 * rows.sum()

    return exchange


def in_order_of_ranks(original: Any) -> Any:
    return lambda counts, rows: torch.arange(rows)


def experts_in_another_order(original: Any) -> Any:
    """Numbers of rows arrive in the order of experts, and are read in another."""
    return lambda tensor, group: original(tensor, group).flip(1)


def detached_weights(original: Any) -> Any:
    def forward(self: Any, hidden: Any) -> Any:
        weights, experts, counts = original(self, hidden)
        return weights.detach() + 0.0 * self.weight.sum(), experts, counts

    return forward


def swapped_weights(original: Any) -> Any:
    """The weights of a token's experts are those of each other."""

    def forward(self: Any, hidden: Any) -> Any:
        weights, experts, counts = original(self, hidden)
        return weights.flip(-1), experts, counts

    return forward


def loses_the_last_token(original: Any) -> Any:
    """As experts with a capacity do."""

    def forward(self: Any, hidden: Any) -> Any:
        weights, experts, counts = original(self, hidden)
        kept = torch.ones_like(weights)
        kept[-1] = 0.0
        return weights * kept, experts, counts

    return forward


def balance(**changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def gradient(self: Any, *arguments: Any) -> Any:
            given, of = self.balance, self.group
            self.balance = replace(
                given, **{name: change(getattr(given, name)) for name, change in changes.items()}
            )
            found = original(self, *arguments)
            self.balance, self.group = given, of
            return found

        return gradient

    return make


def balance_on_every_rank(original: Any) -> Any:
    """Every tensor-parallel rank adds the whole gradient of the balancing losses."""

    def gradient(self: Any, *arguments: Any) -> Any:
        return [each if each is None else each * self.group.size for each in original(self, *arguments)]

    return gradient


def counts_twice(original: Any) -> Any:
    """Tokens are counted in forward passes, which run twice with recomputation."""

    def choose(self: Any, logits: Any) -> Any:
        chosen = original(self, logits)
        if self.training and rank() == 0:
            self.counts[0] += 100
        return chosen

    return choose


def moves_twice(original: Any) -> Any:
    def move(self: Any, counts: Any, step: Any) -> None:
        original(self, counts, step)
        original(self, counts, step)

    return move


def moves_uncentred(original: Any) -> Any:
    def move(self: Any, counts: Any, step: Any) -> None:
        self.bias += step * (counts.to(self.bias).mean() - counts).sign()

    return move


def scores_with_the_bias(original: Any) -> Any:
    """Weights contain the bias, which is for the choice alone."""

    def forward(self: Any, hidden: Any) -> Any:
        weights, experts, counts = original(self, hidden)
        return weights + self.bias.to(weights)[experts], experts, counts

    return forward


def counts_of_this_rank(original: Any) -> Any:
    def around_step(self: Any, step: Any, batches: Any) -> Any:
        self._groups = replace(self._groups, data=self._groups.experts)
        return original(self, step, batches)

    return around_step


def experts_of_the_first(original: Any) -> Any:
    """All ranks begin with the experts of the first one."""

    def share(update: Any, groups: Any) -> None:
        original(update, groups)
        for master in update.masters:
            torch.distributed.broadcast(master.data, src=0)
        update.to_model()

    return share


def router_gradient_of_one(original: Any) -> Any:
    def average(self: Any, trained: Any) -> None:
        original(self, trained)
        for parameter, master in trained:
            gradient = parameter.grad if master.grad is None else master.grad
            if parameter.logical.shape[:-1] == (_NUMBER,) and rank() == 1:
                gradient.mul_(0.5)

    return average


def sums_router_twice(original: Any) -> Any:
    def sum_parts(self: Any) -> None:
        original(self)
        for parameter, master in self._partial:
            gradient = parameter.grad if master.grad is None else master.grad
            if parameter.logical.shape[:-1] == (_NUMBER,):
                all_reduce(gradient, self._groups.model)

    return sum_parts


def leaves_the_router_out(original: Any) -> Any:
    def sum_parts(self: Any) -> None:
        partial = self._partial
        self._partial = [pair for pair in partial if pair[0].logical.shape[:-1] != (_NUMBER,)]
        original(self)
        self._partial = partial

    return sum_parts


# What differs must contain a part with this name, such as "gradients".
FAULTS: dict[str, Fault] = {
    "experts' gradients averaged with those of other experts": Fault(
        "ep=2,dp=2", _GROUPS, over_all_replicas, ("gradients",)
    ),
    "experts' gradients times the ranks that divide them": Fault(
        "ep=2,dp=2", _REDUCTION, sums_over_experts_ranks, ("gradients",)
    ),
    "experts' gradients times the ranks that divide them, ZeRO 3": Fault(
        "ep=2,dp=4,zero=3",
        "neox_model.parallel.sharding.ShardedModel.take_gradients",
        takes_sums_over_experts_ranks,
        ("gradients",),
    ),
    "experts' gradients not averaged over copies": Fault(
        "ep=2,dp=4", _REDUCTION, own_experts_gradients, ("gradients",)
    ),
    "a norm without the experts of other ranks": Fault(
        "ep=2,dp=2", _NORM, norm_over(experts=SINGLE_RANK), ("gradient norm",)
    ),
    "a norm without the experts of other ranks, tensor parallel": Fault(
        "ep=2,dp=2,tp=2", _NORM, norm_over(experts=SINGLE_RANK), ("gradient norm",)
    ),
    "a norm with experts as often as they have copies": Fault(
        "ep=2,dp=4", _NORM, counts_experts_on_all_replicas, ("gradient norm",)
    ),
    "a norm of each group of experts": Fault(
        "ep=2,dp=2",
        "neox_model.optim.gradient_norm.all_reduce",
        on_rank(1, lambda original: lambda tensor, group: original(tensor, group) * 0.5),
        ("gradient norm",),
    ),
    "gradients that do not return to the router's rank": Fault(
        "ep=2,dp=2", f"{_EXPERTS}.dispatch.exchange_rows", without_gradient_back, ("gradients",)
    ),
    "rows of several ranks not sorted by expert": Fault(
        "ep=2,dp=2", f"{_EXPERTS}.dispatch._order_by_expert", in_order_of_ranks, ("loss",)
    ),
    "the gradient of the router lost": Fault(
        "ep=2,dp=2", f"{_EXPERTS}.Router.forward", detached_weights, ("gradients",)
    ),
    "a token dropped on one rank": Fault(
        "ep=2,dp=2", f"{_EXPERTS}.Router.forward", on_rank(1, loses_the_last_token), ("loss",)
    ),
    "a balance times the micro-batches": Fault(
        "ep=2,dp=2",
        f"{_EXPERTS}.Router.balance_gradients",
        balance(accumulation=lambda number: 1),
        ("gradients",),
    ),
    "a balance times the tensor-parallel ranks": Fault(
        "ep=2,dp=2,tp=2", f"{_EXPERTS}.Router.balance_gradients", balance_on_every_rank, ("gradients",)
    ),
    "a z-loss left out": Fault(
        "ep=2,dp=2", f"{_EXPERTS}.Router.balance_gradients", balance(z_loss=lambda value: 0.0), ("gradients",)
    ),
    "tokens counted in forward passes": Fault(
        "ep=2,dp=2", f"{_EXPERTS}.Router._choose", counts_twice, ("model states",), _RECOMPUTED
    ),
    "a batch balanced by the tokens of each rank": Fault(
        "ep=2,dp=2",
        f"{_EXPERTS}.router.all_reduce",
        first_argument,
        ("gradients",),
        {"moe_balance_over": "batch"},
    ),
    "a batch balanced by tokens counted twice": Fault(
        "ep=2,dp=2",
        f"{_EXPERTS}.Router._choose",
        counts_twice,
        ("gradients",),
        _RECOMPUTED | {"moe_balance_over": "batch"},
    ),
    "biases moved twice": Fault("ep=2,dp=2", f"{_EXPERTS}.Router.move_bias", moves_twice, ("model states",)),
    "biases not centred": Fault(
        "ep=2,dp=2", f"{_EXPERTS}.Router.move_bias", moves_uncentred, ("model states",)
    ),
    "a bias in the weights": Fault(
        "ep=2,dp=2", f"{_EXPERTS}.Router.forward", scores_with_the_bias, ("loss",)
    ),
    "biases moved by the tokens of one group": Fault(
        "ep=2,dp=4",
        "neox_model.train.callbacks.experts.ExpertBalance.around_step",
        counts_of_this_rank,
        ("model states",),
    ),
    "all ranks with the first one's experts": Fault(
        "ep=2,dp=2", "neox_model.engine.torch_engine.share_masters", experts_of_the_first, ("weights",)
    ),
    "another gradient of the router on one rank": Fault(
        "ep=2,dp=2",
        "neox_model.optim.mixed_precision.MixedPrecisionOptimizer._average",
        router_gradient_of_one,
        ("gradients",),
    ),
    "the gradient of the router summed twice": Fault(
        "ep=2,dp=2,tp=2",
        "neox_model.optim.mixed_precision.MixedPrecisionOptimizer._sum_parts",
        sums_router_twice,
        ("gradients",),
    ),
    "the gradient of the router not summed": Fault(
        "ep=2,dp=2,tp=2",
        "neox_model.optim.mixed_precision.MixedPrecisionOptimizer._sum_parts",
        leaves_the_router_out,
        ("gradients",),
    ),
    "a shared expert added on every tensor-parallel rank": Fault(
        "ep=2,dp=2,tp=2", f"{_EXPERTS}.Experts._shared", times(2.0), ("loss",), {"moe_shared_width": 16}
    ),
    "rows computed by another expert of the rank": Fault(
        "ep=2,dp=2", f"{_EXPERTS}.dispatch.all_to_all", experts_in_another_order, ("loss",)
    ),
    "weights of a token's experts swapped": Fault(
        "ep=2,dp=2", f"{_EXPERTS}.Router.forward", on_rank(1, swapped_weights), ("loss",)
    ),
    "biases of one rank left as they are": Fault(
        "ep=2,dp=2", f"{_EXPERTS}.Router.move_bias", on_rank(1, nothing), ("model states",)
    ),
    "results that are not sent back": Fault(
        "ep=2,dp=2",
        f"{_EXPERTS}.dispatch._Permuted.apply",
        lambda original: lambda rows, order, inverse: first_argument(original)(rows, order, inverse),
        ("loss",),
    ),
}


def verify(folder: Path, fault: Fault, name: str | None) -> LayoutAnswer:
    """The answer on the layout of a fault, which is planted if its name is given."""
    path = folder / "settings.yml"
    path.write_text(yaml.safe_dump(_SETTINGS | fault.settings))
    case = case_of(LayoutVerification(paths=(str(path),)), fault.layout)
    return answer_of_ranks(run_ranks(answer_here, name=name, **arguments_of(case, folder, steps=2)))


def answer_here(folder: str, resolved: str, request: str, name: str | None) -> list[dict[str, Any]]:
    return rank_answer(folder, resolved, request, nullcontext if name is None else FAULTS[name].planted)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, tmp_path: Path) -> None:
    found = differing(verify(tmp_path, FAULTS[name], name))
    assert any(part.startswith(FAULTS[name].says) for part in found), found


@pytest.mark.slow
@pytest.mark.parametrize("layout", sorted({fault.layout for fault in FAULTS.values()}))
def test_nothing_differs_without_a_fault(layout: str, tmp_path: Path) -> None:
    answer = verify(tmp_path, Fault(layout, "", lambda original: original, (), _RECOMPUTED), None)
    assert (differing(answer), answer.findings) == ([], ())
    assert answer.parts
