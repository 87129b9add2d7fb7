"""Mixtures of experts against formulas, GPT-NeoX's router and transformers' models."""

from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional

from neox_config.estimate import flops_per_token
from neox_config.estimate.parameters import active_parameters, count_parameters
from neox_model.assembly.model import build_model
from neox_model.initialization import build_init_method, initialize_parameters
from neox_model.layers.activations import clamped_swiglu
from neox_model.layers.experts import (
    Balance,
    ExpertBlocks,
    Experts,
    Router,
    grouped_product,
    looped_product,
    sinkhorn,
)
from neox_model.layers.mlp import GatedMLP
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.parallel.logical import model_states, named_logical_parameters
from support.settings import specs_from

WIDTH, INNER, LENGTH, BATCH, NUMBER = 8, 16, 7, 3, 5
NORMAL = build_init_method("normal", std=0.5, hidden_size=WIDTH, num_layers=2)


def hidden(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(LENGTH, BATCH, WIDTH, generator=generator).to(dtype)


def experts(
    *, chosen: int = 2, dtype: torch.dtype = torch.float64, router: Any = None, **options: Any
) -> Experts:
    given = {"chosen": chosen, "init": NORMAL, **(router or {})}
    shared = {name: options.pop(name) for name in ("shared", "has_shared_gate") if name in options}
    blocks = {"activation": functional.gelu, "init": NORMAL, "output_init": NORMAL, **options}
    layer = Experts(
        WIDTH,
        router=partial(Router, WIDTH, NUMBER, **given),
        blocks=partial(ExpertBlocks, hidden_size=WIDTH, width=INNER, **blocks),
        init=NORMAL,
        **shared,
    )
    initialize_parameters(layer, seed=1)
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(dtype)
    return layer


def plain_swiglu(up: Tensor, gate: Tensor) -> Tensor:
    return up * functional.silu(gate)


def clamped(up: Tensor, gate: Tensor) -> Tensor:
    """As in gpt-oss, with limits that some values reach."""
    gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
    return (up + 1.0) * gate * torch.sigmoid(1.7 * gate)


def formula(
    layer: Experts,
    hidden_SBD: Tensor,
    scores: Any,
    *,
    chosen: int,
    normalized: bool,
    gated: Any = plain_swiglu,
) -> Tensor:
    """Each token by itself, with all experts, of which those that are not chosen have the weight 0."""
    rows, blocks, bias = [], layer.experts, layer.router.logits_bias
    names = ("up_bias", "gate_bias", "down_bias")
    biases = {name: 0.0 if (each := getattr(blocks, name)) is None else each for name in names}
    for token in hidden_SBD.reshape(-1, WIDTH):
        logits = layer.router.weight @ token
        probabilities = scores(logits if bias is None else logits + bias)
        weights = torch.zeros(NUMBER, dtype=token.dtype)
        best = probabilities.topk(chosen).indices
        weights[best] = probabilities[best]
        weights = weights / weights.sum() if normalized else weights
        wide = torch.einsum("d,edf->ef", token, blocks.up) + biases["up_bias"]
        if blocks.gate is None:
            wide = functional.gelu(wide)
        else:
            gate = torch.einsum("d,edf->ef", token, blocks.gate) + biases["gate_bias"]
            wide = gated(wide, gate)
        outputs = torch.einsum("ef,efd->ed", wide, blocks.down) + biases["down_bias"]
        rows.append(weights @ outputs)
    return torch.stack(rows).view_as(hidden_SBD)


@pytest.mark.parametrize("chosen", [1, 2, NUMBER])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("is_gated", "normalized"), [(False, False), (True, True)])
def test_a_layer_is_its_formula(*, chosen: int, scores: str, is_gated: bool, normalized: bool) -> None:
    activation = functional.silu if is_gated else functional.gelu
    router = {"scores": scores, "normalized": normalized}
    layer = experts(chosen=chosen, router=router, activation=activation, is_gated=is_gated)
    function = torch.sigmoid if scores == "sigmoid" else partial(torch.softmax, dim=-1)
    found = {}
    for name, compute in {
        "layer": lambda inputs: layer(inputs)[0],
        "formula": lambda inputs: formula(layer, inputs, function, chosen=chosen, normalized=normalized),
    }.items():
        layer.zero_grad()
        inputs = hidden().requires_grad_()
        output = compute(inputs)
        output.square().sum().backward()
        found[name] = [output, inputs.grad, *(each.grad.clone() for each in layer.parameters())]
    for ours, theirs in zip(found["layer"], found["formula"], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_layer_with_biases_and_limits_is_its_formula(*, is_gated: bool) -> None:
    """Also the gradients: those of an expert without tokens are 0, and not None."""
    router = {"normalized": True, "has_logits_bias": True}
    limits = partial(clamped_swiglu, limit=0.5, alpha=1.7, up_offset=1.0)
    layer = experts(router=router, bias=True, is_gated=is_gated, gated=limits)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "bias" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        layer.router.logits_bias[1] = -50.0
    softmax, found = partial(torch.softmax, dim=-1), []
    for compute in (
        lambda inputs: layer(inputs)[0],
        lambda inputs: formula(layer, inputs, softmax, chosen=2, normalized=True, gated=clamped),
    ):
        layer.zero_grad()
        inputs = hidden().requires_grad_()
        output = compute(inputs)
        output.square().sum().backward()
        found.append([output, inputs.grad, *(each.grad.clone() for each in layer.parameters())])
    names = [name for name, _ in layer.named_parameters()]
    assert {"router.logits_bias", "experts.up_bias", "experts.down_bias"} <= set(names)
    for name, ours, theirs in zip(["output", "inputs", *names], *found, strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")
    for name, ours in zip(names, found[0][2:], strict=True):
        if name.startswith("experts"):
            assert not ours[1].any()
            assert ours[0].any()


@pytest.mark.parametrize("family", ["V3", "V2"])
def test_groups_of_experts_compete_as_in_deepseek(family: str) -> None:
    """Against transformers' routers; of a third group score, or of a factor too early, others are chosen."""
    import transformers

    sizes = {"hidden_size": WIDTH, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    own = {
        "V3": {"n_routed_experts": 12, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        "V2": {"n_routed_experts": 12, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    }[family]
    module = f"transformers.models.deepseek_{family.lower()}.modeling_deepseek_{family.lower()}"
    config = getattr(transformers, f"Deepseek{family}Config")(**sizes, **own)
    theirs = resolve_name(f"{module}:Deepseek{family}TopkRouter")(config)
    is_v3 = family == "V3"
    ours = Router(
        WIDTH,
        12,
        chosen=3,
        scores="sigmoid" if is_v3 else "softmax",
        normalized=is_v3,
        scale=2.5 if is_v3 else 16.0,
        groups=4,
        top_groups=2,
        has_bias=is_v3,
        init=NORMAL,
    )
    initialize_parameters(ours, seed=1)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight)
        if is_v3:
            ours.bias.copy_(0.3 * torch.randn(12, generator=torch.Generator().manual_seed(5)))
            theirs.e_score_correction_bias.copy_(ours.bias)
        inputs = torch.randn(50, 4, WIDTH, generator=torch.Generator().manual_seed(6))
        weights, chosen, counts = ours(inputs)
        _, their_weights, their_chosen = theirs(inputs)
    (order, mine) = their_chosen.argsort(), chosen.argsort()
    assert torch.equal(chosen.gather(1, mine), their_chosen.gather(1, order))
    torch.testing.assert_close(weights.gather(1, mine), their_weights.gather(1, order), rtol=1e-6, atol=0)
    assert int(counts.sum()) == 50 * 4 * 3
    groups = (chosen // 3).sort(dim=1).values
    assert ((groups[:, 1:] != groups[:, :-1]).sum(dim=1) < 2).all()
    # The faults: the score of the other class, and no groups at all.
    for fault in ({"summed": 1 if is_v3 else 2}, {"groups": 1}):
        before = {name: getattr(ours, name) for name in fault}
        vars(ours).update(fault)
        assert not torch.equal(ours(inputs)[1].sort(dim=1).values, chosen.sort(dim=1).values)
        vars(ours).update(before)


def test_experts_of_other_groups_are_never_chosen_with_negative_scores() -> None:
    """Biases below all scores, with which experts that count as 0 would be chosen."""
    router = Router(WIDTH, 8, chosen=4, scores="sigmoid", groups=4, top_groups=2, has_bias=True, init=NORMAL)
    initialize_parameters(router, seed=1)
    router.bias.fill_(-3.0)
    chosen = router(hidden(torch.float32))[1]
    assert (chosen // 2).sort(dim=1).values[:, ::2].diff(dim=1).ne(0).all()
    assert torch.equal((chosen // 2).sort(dim=1).values[:, ::2], (chosen // 2).sort(dim=1).values[:, 1::2])


@pytest.mark.parametrize("size", [1.0, 10.0, 60.0])
def test_the_softmax_of_the_largest_logits_is_that_of_all_normalized(size: float) -> None:
    """As gpt-oss has it, in float32: no more than some units in the last place apart."""
    router = Router(WIDTH, 32, chosen=4, normalized=True, has_logits_bias=True, init=NORMAL)
    initialize_parameters(router, seed=1)
    with torch.no_grad():
        router.logits_bias.normal_(generator=torch.Generator().manual_seed(2))
        inputs = size * torch.randn(100, 3, WIDTH, generator=torch.Generator().manual_seed(7))
        weights, chosen, _ = router(inputs)
        logits = functional.linear(inputs, router.weight, router.logits_bias).flatten(0, 1)
        largest, expected = logits.topk(4)
    theirs, exact = largest.softmax(dim=-1), largest.double().softmax(dim=-1)
    # What has no normal float32 number is no weight in either.
    counts = exact > torch.finfo(torch.float32).tiny
    assert torch.equal(chosen[counts], expected[counts])
    errors = [float((each / exact - 1)[counts].abs().max()) for each in (weights, theirs)]
    assert errors[0] <= 4 * errors[1]
    assert float((weights - exact).abs().max()) < 1e-6


def test_the_shared_expert_is_added_times_its_gate() -> None:
    shared = partial(
        GatedMLP, WIDTH, INNER, activation=functional.silu, init=NORMAL, output_init=NORMAL, bias=False
    )
    layer = experts(shared=shared, has_shared_gate=True)
    inputs = hidden()
    whole = layer(inputs)[0]
    gate, module = layer.shared_gate, layer.shared
    layer.shared = None
    expected = layer(inputs)[0] + module(inputs)[0] * torch.sigmoid(inputs @ gate.t())
    torch.testing.assert_close(whole, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_is_the_loop_to_the_last_bit(dtype: torch.dtype) -> None:
    """Forward and backward, with an expert without tokens, whose gradient is 0."""
    counts = torch.tensor([3, 0, 9, 1, 7])
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(20, 16, generator=generator).to(dtype)
    weight = torch.randn(NUMBER, 16, 24, generator=generator).to(dtype)
    found = []
    for product in (grouped_product, looped_product):
        leaves = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        output = product(*leaves, counts)
        # Expanded, as the gradient of a sum is.
        output.sum().backward()
        assert not leaves[1].grad[1].any()
        found.append([output, *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_what_was_in_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory that holds NaN, as the rows behind the last expert's would."""
    layer = experts(dtype=torch.float32, product=grouped_product)
    expected = layer(hidden(torch.float32))[0]
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, partial(poisoned, getattr(torch, name)))
    assert torch.equal(layer(hidden(torch.float32))[0], expected)


def poisoned(make: Any, *arguments: Any, **options: Any) -> Tensor:
    found = make(*arguments, **options)
    return found.fill_(float("nan")) if found.is_floating_point() else found


ROUTERS = {
    "balanced": {
        "balance": Balance(loss=0.1, z_loss=0.1, jitter=0.1),
        "has_bias": True,
        "scores": "sigmoid",
        "normalized": True,
    },
    "sinkhorn": {"balance": Balance(sinkhorn=True)},
}


@pytest.mark.parametrize("router", ROUTERS)
def test_the_host_reads_nothing_from_the_device(router: str) -> None:
    """Tensors have no values, so that reading one, or a shape that depends on them, is an error."""
    layer = experts(router=ROUTERS[router], activation=functional.silu, is_gated=True)
    shapes = {name: each.shape for name, each in layer.named_parameters()}
    with FakeTensorMode():
        layer._apply(lambda each: torch.empty(each.shape, dtype=bfloat16_if_floating(each.dtype)))
        if layer.router.bias is not None:
            layer.router.bias = torch.zeros(NUMBER)
        layer.experts.product = grouped_product
        inputs = torch.empty(LENGTH, BATCH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        layer(inputs)[0].sum().backward()
        assert {name: each.grad.shape for name, each in layer.named_parameters()} == shapes
        layer.router.move_bias(layer.router.take_counts(), 0.1)
        layer.experts.product = looped_product
        with pytest.raises(DataDependentOutputException):
            layer(inputs)


def bfloat16_if_floating(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype.is_floating_point else dtype


def neox_sinkhorn(cost: Tensor) -> Tensor:
    """GPT-NeoX's, with the break."""
    cost = cost.exp()
    d1, old = 1 / (cost.size(1) * cost.sum(0)), None
    old = d1
    for _ in range(3):
        d0 = (1 / cost.size(0)) * 1 / ((d1 * cost).sum(1) + 1e-8)
        d1 = (1 / cost.size(1)) * 1 / ((d0.unsqueeze(1) * cost).sum(0) + 1e-8)
        error, old = (old - d1).abs().mean(), d1
        if error < 1e-4:
            break
    return d1 * cost * d0.unsqueeze(1)


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 3.0])
def test_sinkhorn_ends_where_that_of_gpt_neox_does(size: float) -> None:
    logits = size * torch.randn(40, NUMBER, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(sinkhorn(logits), neox_sinkhorn(logits))


def test_sinkhorn_chooses_in_training_alone_and_gives_no_weights() -> None:
    layer = experts(chosen=1, router={"scores": "sigmoid", "balance": Balance(sinkhorn=True)})
    inputs = hidden()
    logits = inputs.flatten(0, 1) @ layer.router.weight.t()
    weights, chosen, counts = layer.router(inputs)
    assert torch.equal(chosen, neox_sinkhorn(logits).topk(1).indices)
    torch.testing.assert_close(weights, torch.sigmoid(logits).gather(1, chosen))
    assert torch.equal(counts, chosen.flatten().bincount(minlength=NUMBER))
    layer.eval()
    evaluated = layer.router(inputs)[1]
    assert torch.equal(evaluated, logits.topk(1).indices)
    assert not torch.equal(evaluated, chosen)


def balance_loss(
    logits_SBE: Tensor, loads_BE: list[Tensor], *, scores: Any, loss: float, z_loss: float
) -> Tensor:
    """The losses of a micro-batch, given each sequence's tokens of experts, or those that count for it."""
    probabilities = scores(logits_SBE)
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    of_sequences = [
        NUMBER * (load / load.sum() * probabilities[:, row].mean(0)).sum()
        for row, load in enumerate(loads_BE)
    ]
    size = logits_SBE.exp().sum(-1).log().square().mean()
    return loss * torch.stack(of_sequences).mean() + z_loss * size


def loads_of(over: str, chosen: list[Tensor], number: int) -> list[Tensor]:
    """The tokens of experts that count for each sequence of a micro-batch, given all chosen [S, B, K]."""
    counted = {
        "sequence": [chosen[number][:, [row]] for row in range(BATCH)],
        "micro_batch": [chosen[number]] * BATCH,
        "batch": [torch.cat(chosen[: number + 1], dim=1)] * BATCH,
    }[over]
    return [each.flatten().bincount(minlength=NUMBER).double() for each in counted]


def micro_batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    # Another place, so that micro-batches prefer other experts.
    return [
        torch.randn(LENGTH, BATCH, WIDTH, generator=generator).double() + 0.4 * number
        for number in range(count)
    ]


def gradients_of_balance(layer: Experts, *, recomputes: bool, keeps_all: bool = False) -> list[Tensor]:
    """The gradients of three micro-batches' inputs, and of the router's weight.

    `keeps_all`: all forward passes before the first backward pass, as in a pipeline.
    """
    inputs = [each.requires_grad_() for each in micro_batches(3)]

    def run(hidden: Tensor) -> Tensor:
        if recomputes:
            return torch.utils.checkpoint.checkpoint(lambda x: layer(x)[0], hidden, use_reentrant=False)
        return layer(hidden)[0]

    layer.zero_grad()
    if keeps_all:
        for output in [run(each) for each in inputs]:
            output.square().sum().backward()
    else:
        for each in inputs:
            run(each).square().sum().backward()
    return [*(each.grad for each in inputs), layer.router.weight.grad.clone()]


def balanced_by_formula(layer: Experts, over: str, scores: Any, **given: float) -> list[Tensor]:
    """The same by autograd, with a loss scale of 8 and an accumulation of 3."""
    layer.router.balance = Balance()
    inputs = [each.requires_grad_() for each in micro_batches(3)]
    chosen = [layer.router(each)[1].view(LENGTH, BATCH, 2) for each in inputs]
    layer.zero_grad()
    for number, each in enumerate(inputs):
        logits = each @ layer.router.weight.t()
        loads = loads_of(over, chosen, number)
        extra = balance_loss(logits, loads, scores=scores, **given)
        (layer(each)[0].square().sum() + 8.0 / 3 * extra).backward()
    return [*(each.grad for each in inputs), layer.router.weight.grad.clone()]


BALANCED: dict[str, Any] = {
    f"{over}{name}": (over, options)
    for over in ("sequence", "micro_batch", "batch")
    for name, options in {
        "": {"recomputes": False},
        ", recomputed": {"recomputes": True},
        ", recomputed, in flight": {"recomputes": True, "keeps_all": True},
    }.items()
}


@pytest.mark.parametrize("case", BALANCED)
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_gradients_of_balance_are_those_of_the_formula(case: str, scores: str) -> None:
    over, options = BALANCED[case]
    given = {"loss": 0.3, "z_loss": 0.2}
    layer = experts(
        router={"balance": Balance(over=over, accumulation=3, **given), "scores": scores, "normalized": True}
    )
    layer.router.loss_scale = lambda: torch.tensor(8.0)
    found = gradients_of_balance(layer, **options)
    assert int(layer.router.take_counts().sum()) == 3 * 2 * LENGTH * BATCH
    function = torch.sigmoid if scores == "sigmoid" else partial(torch.softmax, dim=-1)
    for ours, theirs in zip(found, balanced_by_formula(layer, over, function, **given), strict=True):
        torch.testing.assert_close(ours, theirs)


def counts_in_forward(original: Any) -> Any:
    def forward(self: Router, hidden: Tensor) -> Any:
        found = original(self, hidden)
        self.counts += found[2]
        return found

    return forward


def without_accumulation(original: Any) -> Any:
    def init(self: Router, *arguments: Any, balance: Balance, **named: Any) -> None:
        original(self, *arguments, balance=replace(balance, accumulation=1), **named)

    return init


@pytest.mark.parametrize(
    ("name", "plant"), [("forward", counts_in_forward), ("__init__", without_accumulation)]
)
def test_planted_faults_of_the_balance_are_found(
    name: str, plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Router, name, plant(getattr(Router, name)))
    with pytest.raises(AssertionError):
        test_gradients_of_balance_are_those_of_the_formula("batch, recomputed", "softmax")


def test_the_loss_of_the_batch_forgets_earlier_updates() -> None:
    layer = experts(router={"balance": Balance(loss=0.3, over="batch")})
    first = gradients_of_balance(layer, recomputes=False)
    kept = gradients_of_balance(layer, recomputes=False)
    layer.router.take_counts()
    again = gradients_of_balance(layer, recomputes=False)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not torch.equal(first[0], kept[0])


def test_even_experts_have_a_loss_of_the_coefficient() -> None:
    logits = torch.zeros(LENGTH * 5, BATCH, NUMBER)
    chosen = torch.arange(LENGTH * 5).view(-1, 1, 1).expand(-1, BATCH, 1) % NUMBER
    probabilities = logits.softmax(-1).mean(0)
    load = torch.stack([chosen[:, row].flatten().bincount(minlength=NUMBER) for row in range(BATCH)])
    assert (load * NUMBER / (LENGTH * 5) * probabilities).sum(-1).mean() == pytest.approx(1.0)


def test_evaluation_counts_no_tokens_and_a_bias_changes_the_choice_alone() -> None:
    layer = experts(router={"has_bias": True})
    inputs = hidden()
    with torch.no_grad():
        _, chosen, _ = layer.router(inputs)
    assert not layer.router.counts.any()
    layer.router.bias[3] = 10.0
    moved, others, _ = layer.router(inputs)
    assert (others == 3).any(dim=1).all()
    probabilities = (inputs.flatten(0, 1) @ layer.router.weight.t()).softmax(-1)
    torch.testing.assert_close(moved, probabilities.gather(1, others))
    assert not torch.equal(chosen, others)


def test_by_position_scores_give_weights_but_choose_nothing() -> None:
    layer = experts(chosen=2)
    layer.router.by_position = True
    inputs = hidden()
    weights, chosen, counts = layer.router(inputs)
    expected = [[(2 * place) % NUMBER, (2 * place + 1) % NUMBER] for place in range(LENGTH)]
    assert chosen.view(LENGTH, BATCH, 2)[:, 1].tolist() == expected
    assert torch.equal(counts, chosen.flatten().bincount(minlength=NUMBER))
    probabilities = (inputs.flatten(0, 1) @ layer.router.weight.t()).softmax(-1)
    torch.testing.assert_close(weights, probabilities.gather(1, chosen))


def test_a_bias_moves_towards_the_mean_and_is_centred() -> None:
    router = experts(router={"has_bias": True}).router
    router.move_bias(torch.tensor([10, 0, 4, 3, 3]), 0.5)
    torch.testing.assert_close(router.bias, torch.tensor([-0.7, 0.3, -0.2, 0.3, 0.3]))
    assert router.bias.sum().abs() < 1e-6
    router.bias += 1e-5
    moved = router.bias.clone()
    assert torch.equal(router.bfloat16().bias, moved)


def test_a_checkpoint_has_the_bias_of_each_layer_with_experts() -> None:
    settings = {"moe_num_experts": 4, "moe_router_type": "topk", "moe_expert_bias": True, "moe_layers": [1]}
    model = build_model(*specs_from(settings), SINGLE_PROCESS, vocab_size=11)
    assert [(state.name, state.shape) for state in model_states(model)] == [
        ("layers.1.mlp.router/bias", (4,))
    ]


def ours_like(theirs: nn.Module, config: Any, settings: dict[str, Any]) -> nn.Module:
    """Our model with the weights of a model of transformers like Llama with experts."""
    common = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "norm": "rmsnorm",
        "rms_norm_epsilon": config.rms_norm_eps,
        "pos_emb": "rotary",
        "activation": "swiglu",
        "use_bias_in_attn_linear": False,
        "use_bias_in_mlp": False,
        "no_weight_tying": True,
        "moe_num_experts": getattr(config, "num_local_experts", None) or config.num_experts,
        "moe_top_k": config.num_experts_per_tok,
        "moe_router_type": "topk",
    }
    spec, run = specs_from(common | settings)
    model = build_model(spec, run, SINGLE_PROCESS, vocab_size=config.vocab_size)
    heads, state = config.num_attention_heads, theirs.state_dict()
    ours = dict(named_logical_parameters(model))
    copies = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "final_norm.weight": state["model.norm.weight"],
        "lm_head.weight": state["lm_head.weight"],
    }
    for index in range(config.num_hidden_layers):
        there, here = f"model.layers.{index}.", f"layers.{index}."
        for part in ("weight", "bias"):
            if f"{there}self_attn.q_proj.{part}" in state:
                parts = [
                    state[f"{there}self_attn.{name}_proj.{part}"].unflatten(0, (heads, -1)) for name in "qkv"
                ]
                copies[f"{here}attention.qkv.{part}"] = torch.cat(parts, dim=1).flatten(0, 1)
        for name, part in (("query", "q"), ("key", "k")):
            if f"{there}self_attn.{part}_norm.weight" in state:
                copies[f"{here}attention.qk_norm.{name}.weight"] = state[
                    f"{there}self_attn.{part}_norm.weight"
                ]
        copies[f"{here}attention.dense.weight"] = state[f"{there}self_attn.o_proj.weight"]
        copies[f"{here}norm1.weight"] = state[f"{there}input_layernorm.weight"]
        copies[f"{here}norm2.weight"] = state[f"{there}post_attention_layernorm.weight"]
        block = next(name for name in ("mlp", "block_sparse_moe") if f"{there}{name}.gate.weight" in state)
        gate_up = state[f"{there}{block}.experts.gate_up_proj"]
        gate, up = gate_up.transpose(1, 2).chunk(2, dim=-1)
        copies[f"{here}mlp.router.weight"] = state[f"{there}{block}.gate.weight"]
        copies[f"{here}mlp.experts.gate"], copies[f"{here}mlp.experts.up"] = gate, up
        copies[f"{here}mlp.experts.down"] = state[f"{there}{block}.experts.down_proj"].transpose(1, 2)
        if f"{there}mlp.shared_expert_gate.weight" in state:
            copies[f"{here}mlp.shared_gate"] = state[f"{there}mlp.shared_expert_gate.weight"]
            for name in ("up", "gate", "down"):
                shared = state[f"{there}mlp.shared_expert.{name}_proj.weight"]
                copies[f"{here}mlp.shared.{name}.weight"] = shared
    assert copies.keys() == ours.keys()
    with torch.no_grad():
        for name, value in copies.items():
            ours[name].copy_(value)
    return model


@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe", "Olmoe"])
def test_logits_are_those_of_transformers(family: str) -> None:
    import transformers

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 31,
        "max_position_embeddings": 12,
        "num_experts_per_tok": 2,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    own = {
        "Mixtral": {"num_local_experts": 5, "intermediate_size": 24},
        "Qwen2Moe": {
            "num_experts": 6,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "intermediate_size": 64,
        },
        "Olmoe": {"num_experts": 6, "intermediate_size": 24},
    }[family]
    config = getattr(transformers, f"{family}Config")(**sizes, **own)
    torch.manual_seed(4)
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    settings = {
        "Mixtral": {"moe_expert_width": 24, "moe_normalize_weights": True},
        "Qwen2Moe": {
            "moe_expert_width": 24,
            "moe_shared_width": 40,
            "moe_shared_gate": True,
            "use_bias_in_qkv": True,
        },
        "Olmoe": {"moe_expert_width": 24, "qk_norm": "width"},
    }[family]
    if hasattr(config, "rope_parameters"):
        settings["rotary_emb_base"] = int(config.rope_parameters["rope_theta"])
    ours = ours_like(theirs, config, settings).eval()
    tokens = torch.randint(0, 31, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = theirs(tokens).logits, ours(tokens)
    error = (found - expected).abs().max() / expected.abs().max()
    assert error <= 1e-5


@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("adapters", [{}, {"lora_rank": 3, "lora_base": "x"}])
def test_estimates_count_the_parameters_of_experts_and_those_that_are_used(
    adapters: dict[str, Any], *, has_biases: bool
) -> None:
    settings = adapters | {
        "moe_num_experts": 5,
        "moe_top_k": 2,
        "moe_layers": [0, 2],
        "moe_expert_width": 16,
        "moe_shared_width": 8,
        "moe_shared_gate": True,
        "activation": "swiglu",
        "use_bias_in_experts": has_biases,
        "moe_router_bias": has_biases,
    }
    spec, run = specs_from(settings)
    model = build_model(spec, run, SINGLE_PROCESS, vocab_size=11)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert sum(count_parameters(spec, 11).values()) == total
    of_adapters = 3 * (16 + 24) if adapters else 0
    unused = 2 * 3 * (3 * (16 * 24 + of_adapters) + has_biases * (2 * 16 + 24))
    assert active_parameters(spec, 11) == total - unused
    more = specs_from(settings | {"moe_num_experts": 9})[0]
    operations = [flops_per_token(each, entries=11, length=12) for each in (spec, more)]
    # Four more rows of two routers.
    assert operations[1] - operations[0] == 3 * 2 * 2 * 4 * 24
