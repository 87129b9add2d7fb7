"""Two tensor-parallel ranks against one, with real processes: outputs, gradients, loss and dropout."""

import gc
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from neox_model.errors import LayoutError
from neox_model.initialization import build_init_method, initialize_parameters
from neox_model.layers.attention import DenseCore, ParallelAttention
from neox_model.layers.embedding import Embedding
from neox_model.layers.lm_head import LMHead, LMLoss, gather_vocabulary
from neox_model.layers.mlp import MLP, GatedMLP
from neox_model.layers.norms import LayerNorm, RMSNorm, ScaleNorm
from neox_model.layers.positions import LearnedPosition, RotaryPosition
from neox_model.layers.residual_layer import add_dropped
from neox_model.layers.transformer_layer import TransformerLayer
from neox_model.parallel.collectives import (
    copy_to_group,
    gather_from_group,
    gather_to_group,
    reduce_from_group,
    reduce_scatter_from_group,
    scatter_to_group,
)
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.linear import ColumnParallelLinear
from neox_model.parallel.random import seed_streams, split_stream
from neox_model.parallel.sequence import with_own_dropout
from neox_model.parallel.topology import create_groups
from support.distributed import run_ranks
from support.refusals import refused

WIDTH, HEADS, LENGTH, BATCH, VOCAB = 24, 6, 10, 2, 11
NORMAL = build_init_method("normal", std=0.3, hidden_size=WIDTH, num_layers=2)


def build(
    group: Group,
    *,
    dropout: float = 0.0,
    gated: bool = False,
    skip_bias: bool = False,
    tied: bool = False,
    norm: type[nn.Module] = RMSNorm,
):
    """Embedding, two layers, norm and head; a vocabulary of 11 needs a padding row on two ranks."""
    mlp = (
        partial(GatedMLP, WIDTH, 40, activation=functional.silu)
        if gated
        else partial(MLP, WIDTH, 40, activation=functional.gelu)
    )
    shared = {"init": NORMAL, "output_init": NORMAL, "group": group, "skip_bias": skip_bias}
    attention = partial(
        ParallelAttention,
        WIDTH,
        HEADS,
        core=partial(DenseCore, dropout=dropout, group=group),
        position=partial(RotaryPosition, head_width=WIDTH // HEADS, fraction=0.5),
        **shared,
    )
    layer = partial(
        TransformerLayer,
        attention=attention,
        mlp=partial(mlp, **shared),
        norm=partial(norm, WIDTH, group=group),
        dropout=dropout,
        bias_dropout_add=with_own_dropout(add_dropped, group),
        group=group,
    )
    embedding = Embedding(
        VOCAB,
        WIDTH,
        init=NORMAL,
        position=partial(LearnedPosition, LENGTH, WIDTH, init=NORMAL, group=group),
        dropout=dropout,
        group=group,
    )
    head = LMHead(
        VOCAB, WIDTH, init=NORMAL, group=group, weight=embedding.word_embeddings.weight if tied else None
    )
    model = nn.Sequential(embedding, layer(), layer(parallel_residual=True), norm(WIDTH, group=group), head)
    initialize_parameters(model, seed=7)
    return model


def gathered(local: Tensor, split_dim: int, group: Group) -> Tensor:
    return gather_from_group(local.detach().contiguous(), group, split_dim)


def check_equal_to_one_rank(group: Group, **options) -> None:
    split, whole = build(group, **options), build(SINGLE_RANK, **options)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
    mask = (torch.rand(BATCH, LENGTH, generator=generator) > 0.2).float()
    losses = []
    for model, ranks in ((split, group), (whole, SINGLE_RANK)):
        logits = model(tokens)
        loss = LMLoss(VOCAB, ranks)(logits, (labels, mask / mask.sum()))
        loss.backward()
        losses.append((loss.detach(), gather_vocabulary(logits, ranks, VOCAB)))
    torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-5)
    expected = dict(whole.named_parameters())
    for name, parameter in split.named_parameters():
        for mine, other in ((parameter.data, expected[name].data), (parameter.grad, expected[name].grad)):
            block = other[tuple(slice(*limits) for limits in parameter.logical.slices)]
            held = mine[tuple(slice(0, length) for length in block.shape)]
            torch.testing.assert_close(held, block, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
            assert float(mine.square().sum() - held.square().sum()) == pytest.approx(0.0, abs=1e-6)


def check_bfloat16(group: Group) -> None:
    """Losses and gradients of 16-bit weights are as close to those of float32 as on one rank."""
    errors = {}
    _, exact = _loss_and_gradients(build(SINGLE_RANK, gated=True), SINGLE_RANK)
    for ranks in (group, SINGLE_RANK):
        loss, gradients = _loss_and_gradients(build(ranks, gated=True).bfloat16(), ranks)
        wrong = [gathered_error(gradient, exact[name], ranks, group) for name, gradient in gradients.items()]
        errors[ranks.size] = max(wrong)
        errors[f"loss {ranks.size}"] = loss
    assert errors[2] < 1.5 * errors[1], errors
    assert errors["loss 2"] == pytest.approx(errors["loss 1"], rel=5e-3)


def _loss_and_gradients(model: nn.Module, ranks: Group) -> tuple[float, dict[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(0, VOCAB, (2, BATCH, LENGTH), generator=generator)
    loss = LMLoss(VOCAB, ranks)(model(tokens), (labels, torch.full((BATCH, LENGTH), 1 / (BATCH * LENGTH))))
    loss.backward()
    return loss.item(), dict(model.named_parameters())


def gathered_error(parameter: nn.Parameter, exact: nn.Parameter, ranks: Group, group: Group) -> float:
    """Norm of the difference of this rank's block of a gradient, relative to the exact one."""
    block = exact.grad[tuple(slice(*limits) for limits in parameter.logical.slices)]
    held = parameter.grad[tuple(slice(0, length) for length in block.shape)]
    return float((held.float() - block).norm() / block.norm())


def check_collectives(group: Group) -> None:
    rank = group.rank
    for function, shape, grad_in, expected_out, expected_grad in (
        (copy_to_group, (2, 4), lambda r: torch.full((2, 4), r + 1.0), lambda x: x, 3.0),
        (reduce_from_group, (2, 4), lambda r: torch.full((2, 4), 5.0), lambda x: 3 * x, 5.0),
    ):
        leaf = torch.ones(shape, requires_grad=True)
        # What reduce overwrites must not be a leaf; rank r passes r + 1 times the leaf.
        value = leaf * (1.0 if function is copy_to_group else rank + 1.0)
        result = function(value, group)
        torch.testing.assert_close(result.detach(), expected_out(torch.ones(shape)))
        result.backward(grad_in(rank))
        scale = 1.0 if function is copy_to_group else rank + 1.0
        torch.testing.assert_close(leaf.grad, torch.full(shape, expected_grad * scale))
    for dim in (0, -1):
        whole = torch.arange(16.0).view(4, 4)
        part = whole.chunk(2, dim)[rank].clone().requires_grad_()
        joined = gather_from_group(part, group, dim)
        torch.testing.assert_close(joined.detach(), whole)
        joined.backward(whole + 1)
        torch.testing.assert_close(part.grad, (whole + 1).chunk(2, dim)[rank])
        replica = whole.clone().requires_grad_()
        mine = scatter_to_group(replica, group, dim)
        torch.testing.assert_close(mine.detach(), whole.chunk(2, dim)[rank])
        mine.backward(torch.full_like(mine, rank + 1.0))
        expected = torch.cat([torch.full_like(mine, r + 1.0) for r in range(2)], dim)
        torch.testing.assert_close(replica.grad, expected)


def check_sequence_collectives(group: Group) -> None:
    whole = torch.arange(24.0).view(6, 4)
    rows = whole.chunk(2)[group.rank].clone().requires_grad_()
    joined = gather_to_group(rows, group)
    torch.testing.assert_close(joined.detach(), whole)
    joined.backward((group.rank + 1) * whole)
    torch.testing.assert_close(rows.grad, 3 * whole.chunk(2)[group.rank])
    partial_sums = (whole * (group.rank + 1)).requires_grad_()
    mine = reduce_scatter_from_group(partial_sums, group)
    torch.testing.assert_close(mine.detach(), 3 * whole.chunk(2)[group.rank])
    mine.backward(torch.full_like(mine, group.rank + 1.0))
    torch.testing.assert_close(partial_sums.grad, torch.tensor([1.0, 1, 1, 2, 2, 2])[:, None].expand(6, 4))


def check_gathered_again(group: Group) -> None:
    """Of the whole sequence, nothing is kept for the backward pass; the gradient is that of what was kept."""
    gradients = []
    for ranks in (group, replace(group, keeps_gathered=True)):
        mlp = GatedMLP(
            WIDTH, 56, activation=functional.silu, init=NORMAL, output_init=NORMAL, group=ranks, bias=False
        )
        initialize_parameters(mlp, seed=3)
        rows = torch.randn(LENGTH // 2, BATCH, WIDTH, generator=torch.Generator().manual_seed(group.rank))
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            result, _ = mlp(rows.requires_grad_())
        # No other tensor has as many elements.
        wholes = [each for each in kept if each.numel() == LENGTH * BATCH * WIDTH]
        assert len({each.data_ptr() for each in wholes}) == int(ranks.keeps_gathered)
        result.square().sum().backward()
        gradients.append([rows.grad, *(parameter.grad for parameter in mlp.parameters())])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def check_freed(group: Group) -> None:
    """The backward pass frees what was kept for it, although its graph lives as long as the loss."""
    shared = {"init": NORMAL, "output_init": NORMAL, "group": group}
    rows = torch.randn(LENGTH // 2, BATCH, WIDTH, requires_grad=True)
    for parallel_residual in (False, True):
        layer = TransformerLayer(
            attention=partial(ParallelAttention, WIDTH, HEADS, core=DenseCore, **shared),
            mlp=partial(GatedMLP, WIDTH, 56, activation=functional.silu, **shared),
            norm=partial(RMSNorm, WIDTH, group=group),
            parallel_residual=parallel_residual,
            group=group,
        )
        initialize_parameters(layer, seed=4)
        known = _tensors()
        loss = layer(rows.exp()).square().sum()
        loss.backward()
        layer.zero_grad()
        rows.grad = None
        _wait_until_freed(known=[*known, loss])


def _wait_until_freed(known: list[Tensor], seconds: float = 20) -> None:
    """Assert that other tensors are freed; gloo's threads release what they have reduced a moment later."""
    ids = {id(each) for each in known}
    deadline = time.monotonic() + seconds
    while left := [each.shape for each in _tensors() if id(each) not in ids]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def _tensors() -> list[Tensor]:
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, Tensor)]


def check_autocast(group: Group) -> None:
    """Products whose inputs are gathered again compute in 16 bit, too, with gradients in float32."""
    found = []
    for ranks in (group, replace(group, keeps_gathered=True)):
        linear = ColumnParallelLinear(WIDTH, 40, init=NORMAL, group=ranks)
        initialize_parameters(linear, seed=3)
        rows = torch.randn(LENGTH // 2, BATCH, WIDTH, generator=torch.Generator().manual_seed(group.rank))
        with torch.autocast("cpu", torch.bfloat16):
            result, _ = linear(rows.requires_grad_())
        assert result.dtype == torch.bfloat16
        result.float().square().sum().backward()
        found.append([result.detach(), rows.grad, linear.weight.grad, linear.bias.grad])
    torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=1e-2)
    assert {each.dtype for each in found[0][1:]} == {torch.float32}


def check_gathered_linear(group: Group) -> None:
    split = ColumnParallelLinear(4, 6, init=NORMAL, group=group)
    whole = ColumnParallelLinear(4, 6, init=NORMAL)
    for module in (split, whole):
        initialize_parameters(module, seed=2)
    x = torch.arange(8.0).view(2, 4)
    torch.testing.assert_close(gather_from_group(split(x)[0], group), whole(x)[0])


def check_streams(group: Group, groups) -> None:
    seed_streams(3, groups)

    def both_ranks(value: Tensor) -> list[Tensor]:
        return list(gathered(value.unsqueeze(0), 0, group))

    shared = [torch.rand(5)]
    with split_stream(group, torch.device("cpu")):
        inside = torch.rand(5)
    shared.append(torch.rand(5))
    for value in shared:
        assert torch.equal(*both_ranks(value))
    assert not torch.equal(*both_ranks(inside))
    # The streams' only state is torch's own: what restores that repeats both.
    state = torch.get_rng_state()
    draws = []
    for _ in range(2):
        torch.set_rng_state(state)
        with split_stream(group, torch.device("cpu")):
            draws.append(torch.rand(5))
    assert torch.equal(*draws)


def check_dropout(group: Group, groups) -> None:
    """Replicated activations keep agreeing between the ranks, gradients of replicated weights too."""
    model = build(group, dropout=0.3)
    seed_streams(3, groups)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    hidden = model[:4](tokens)
    hidden.square().sum().backward()
    assert torch.equal(*gathered(hidden.unsqueeze(0), 0, group))
    assert torch.equal(*gathered(model[1].norm1.weight.grad.unsqueeze(0), 0, group))


def check_split_sequence(group: Group, groups) -> None:
    """Each rank holds its half between the matrices, drops other numbers, and can repeat what it dropped."""
    model = build(group, dropout=0.5)
    seed_streams(3, groups)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    state = torch.get_rng_state()
    hidden = model[0](tokens)
    assert hidden.shape == (LENGTH // 2, BATCH, WIDTH)
    first, second = gathered((hidden == 0).float().unsqueeze(0), 0, group)
    assert not torch.equal(first, second)
    assert first.mean() == pytest.approx(0.5, abs=0.1)
    torch.set_rng_state(state)
    assert torch.equal(model[0](tokens), hidden)
    model[1](hidden).square().sum().backward()
    assert torch.equal(*gathered(model[1].norm1.weight.grad.unsqueeze(0), 0, group))
    # The shared stream stays shared.
    assert torch.equal(*gathered(torch.rand(1, 5), 0, group))


def all_checks() -> None:
    groups = create_groups(2, 1)
    assert (groups.model.rank, groups.model.ranks, groups.data.size) == (dist.get_rank(), (0, 1), 1)
    check_collectives(groups.model)
    check_gathered_linear(groups.model)
    check_equal_to_one_rank(groups.model)
    check_equal_to_one_rank(groups.model, gated=True)
    check_equal_to_one_rank(groups.model, skip_bias=True, tied=True)
    check_bfloat16(groups.model)
    parts = replace(groups.model, splits_sequence=True)
    check_bfloat16(parts)
    check_sequence_collectives(groups.model)
    check_equal_to_one_rank(replace(parts, keeps_gathered=True), gated=True)
    check_gathered_again(parts)
    check_freed(parts)
    check_autocast(parts)
    check_equal_to_one_rank(parts)
    check_equal_to_one_rank(parts, gated=True, norm=ScaleNorm)
    check_equal_to_one_rank(parts, skip_bias=True, tied=True, norm=LayerNorm)
    check_split_sequence(parts, groups)
    check_streams(groups.model, groups)
    check_dropout(groups.model, groups)
    with refused(LayoutError, "3 attention", "over 2"):
        ParallelAttention(WIDTH, 3, core=DenseCore, init=NORMAL, output_init=NORMAL, group=groups.model)


def test_two_tensor_parallel_ranks_equal_one():
    run_ranks(all_checks, size=2)
