"""The loss from logits and straight from hidden states, on one rank and on two, against torch's."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import neox_kernels
from neox_model.layers.lm_head import LMHead, LMLoss
from neox_model.parallel import cross_entropy
from neox_model.parallel.cross_entropy import projected_cross_entropy, vocab_parallel_cross_entropy
from neox_model.parallel.groups import SINGLE_RANK, Group
from neox_model.parallel.topology import create_groups
from support.distributed import run_ranks

TOKENS, WIDTH, VOCAB = 37, 16, 101
# PyTorch's operators, and the fused operator's form for the CPU.
with_operators = pytest.mark.parametrize(
    "operator", [None, neox_kernels.cross_entropy.fused], ids=["plain", "fused"]
)


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    weights = (torch.rand(TOKENS, generator=generator) - 0.3).clamp(min=0.0)
    return hidden, weight, labels, weights / weights.sum()


def plain(hidden, weight, labels, weights):
    each = functional.cross_entropy((hidden @ weight.T).float(), labels, reduction="none")
    return (each * weights).sum()


def gradients(loss, *tensors):
    return torch.autograd.grad(loss * 3.0, tensors)


@with_operators
@pytest.mark.parametrize("chunk_rows", [1, 5, 36, 37, 100, None])
def test_the_loss_from_hidden_states_is_the_plain_one(chunk_rows, operator):
    hidden, weight, labels, weights = inputs()
    loss = projected_cross_entropy(
        hidden, weight, labels, weights, vocab_size=VOCAB, chunk_rows=chunk_rows, operator=operator
    )
    expected = plain(hidden, weight, labels, weights)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    for given, wanted in zip(
        gradients(loss, hidden, weight), gradients(expected, hidden, weight), strict=True
    ):
        torch.testing.assert_close(given, wanted, atol=1e-6, rtol=1e-6)


@with_operators
def test_in_bfloat16_only_the_factors_are_rounded(operator):
    hidden, weight, labels, weights = inputs(torch.bfloat16)
    loss = projected_cross_entropy(
        hidden, weight, labels, weights, vocab_size=VOCAB, chunk_rows=5, operator=operator
    )
    expected = plain(hidden, weight, labels, weights)
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)
    given = gradients(loss, hidden, weight)
    exact = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    wanted = gradients(plain(*exact, labels, weights), *exact)
    for mine, theirs in zip(given, wanted, strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.float(), theirs, atol=0.02, rtol=0.03)


def test_autocast_rounds_the_factors_and_the_gradients_arrive_in_float32():
    hidden, weight, labels, weights = inputs()
    targets = (labels.unsqueeze(0), weights.unsqueeze(0))
    loss = LMLoss(VOCAB, chunk_rows=5)
    with torch.autocast("cpu", torch.bfloat16):
        given = loss.of_hidden(hidden.unsqueeze(1), weight, targets)
    rounded = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    expected = loss.of_hidden(rounded[0].unsqueeze(1), rounded[1], targets)
    assert torch.equal(given, expected)
    for mine, theirs in zip(gradients(given, hidden, weight), gradients(expected, *rounded), strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs.float())


@with_operators
def test_without_gradients_none_are_made(monkeypatch, operator):
    monkeypatch.setattr(cross_entropy, "_loss_and_gradient", None)
    hidden, weight, labels, weights = inputs()
    with torch.no_grad():
        loss = projected_cross_entropy(
            hidden, weight, labels, weights, vocab_size=VOCAB, chunk_rows=5, operator=operator
        )
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(hidden, weight, labels, weights))


def test_no_more_logits_exist_than_a_chunk_has(monkeypatch):
    widest = []
    multiply = torch.Tensor.__matmul__

    def watch(left, right):
        result = multiply(left, right)
        widest.append(result.shape)
        return result

    monkeypatch.setattr(torch.Tensor, "__matmul__", watch)
    hidden, weight, labels, weights = inputs()
    projected_cross_entropy(hidden, weight, labels, weights, vocab_size=VOCAB, chunk_rows=5).backward()
    assert max(shape[0] for shape in widest if shape[1] == VOCAB) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_heads_loss_is_that_of_its_logits(dtype):
    hidden = torch.randn(7, 3, WIDTH).to(dtype).requires_grad_()
    head = LMHead(VOCAB, WIDTH, init=None).to(dtype)
    torch.nn.init.normal_(head.weight, std=0.1)
    targets = (torch.randint(0, VOCAB, (3, 7)), (torch.rand(3, 7) > 0.4).float() / 12)
    loss = LMLoss(VOCAB, chunk_rows=4)
    straight, by_logits = head(hidden, targets, loss), loss(head(hidden), targets)
    exact = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(straight, by_logits, rtol=exact, atol=exact)
    for mine, theirs in zip(
        gradients(straight, hidden, head.weight), gradients(by_logits, hidden, head.weight), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=3 * exact, atol=3 * exact)


def formula(hidden, weight, labels, weights, *, scale, softcap, z_loss):
    """Loss and z-loss in float64; the denominator by its definition."""
    logits = scale * (hidden @ weight.T)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_totals = logits.exp().sum(dim=-1).log()
    losses = log_totals - logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    return (losses * weights).sum(), (z_loss * log_totals.square() * weights).sum()


@with_operators
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_rows", [5, 37])
@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.8, "softcap": None, "z_loss": 0.0},
        {"scale": 1.0, "softcap": 3.0, "z_loss": 0.0},
        {"scale": 1.0, "softcap": None, "z_loss": 0.02},
        {"scale": 1.3, "softcap": 5.0, "z_loss": 0.02},
    ],
    ids=["scale", "softcap", "z-loss", "all"],
)
def test_scale_softcap_and_z_loss_are_those_of_the_formula(options, chunk_rows, dtype, operator):
    """The gradient has the z-loss, and the value has not; in float16 the logits of all tokens are stored."""
    hidden, weight, labels, weights = inputs(dtype)
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    expected, term = formula(*exact, labels, weights.double(), **options)
    loss = LMLoss(VOCAB, chunk_rows=chunk_rows, operator=operator, **options)
    found = loss.of_hidden(hidden.unsqueeze(1), weight, (labels.unsqueeze(0), weights.unsqueeze(0)))
    rounding = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert found.item() == pytest.approx(expected.item(), rel=rounding)
    terms = [term.item()] if options["z_loss"] else []
    assert [each.item() for each in loss.z_terms] == pytest.approx(terms, rel=rounding)
    given = torch.autograd.grad(found * 64, (hidden, weight))
    for mine, theirs in zip(given, torch.autograd.grad(64 * (expected + term), exact), strict=True):
        assert mine.dtype == dtype
        assert float((mine.double() - theirs).norm() / theirs.norm()) < rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_evaluation_has_no_z_loss(dtype):
    hidden, weight, labels, weights = inputs(dtype)
    given = hidden.unsqueeze(1), weight, (labels.unsqueeze(0), weights.unsqueeze(0))
    loss = LMLoss(VOCAB, z_loss=0.5)
    with torch.no_grad():
        found = loss.of_hidden(*given)
    assert loss.z_terms == []
    assert torch.equal(found, LMLoss(VOCAB).of_hidden(*given).detach())


def test_where_the_label_is_nearly_certain_the_fused_gradient_is_exact():
    """In bfloat16 a softmax of 0.9995 is 1, and its gradient would be 0."""
    hidden, weight = torch.ones(1, 1).bfloat16(), torch.tensor([[8.0], [0.25]]).bfloat16()
    (gradients_of,) = (
        torch.autograd.grad(
            projected_cross_entropy(
                hidden.requires_grad_(),
                weight.requires_grad_(),
                torch.tensor([0]),
                torch.ones(1),
                vocab_size=2,
                operator=neox_kernels.cross_entropy.fused,
                z_loss=1e-9,
            ),
            (hidden, weight),
        ),
    )
    p = 1 / (1 + math.exp(0.25 - 8.0))
    torch.testing.assert_close(gradients_of[1][:, 0].float(), torch.tensor([p - 1, 1 - p]), atol=0, rtol=0.01)


def test_the_heads_logits_have_the_softcap_and_the_scale():
    hidden, weight, *_ = inputs()
    head = LMHead(VOCAB, WIDTH, init=None, scale=1.3, softcap=5.0)
    head.weight.data.copy_(weight.detach())
    expected = 5.0 * torch.tanh(1.3 * (hidden @ weight.T).double() / 5.0)
    torch.testing.assert_close(head(hidden.unsqueeze(1))[0].double(), expected, atol=1e-5, rtol=1e-5)
    found = head.bfloat16()(hidden.unsqueeze(1).bfloat16())[0]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, atol=0.05, rtol=0.02)


def test_the_loss_is_the_weighted_sum():
    logits, labels = torch.randn(2, 3, 5), torch.randint(0, 5, (2, 3))
    weights = torch.tensor([[0.5, 0.0, 2.0], [0.0, 0.25, 0.0]])
    each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 3)
    torch.testing.assert_close(LMLoss(5)(logits, (labels, weights)), (each * weights).sum())


def test_float16_cross_entropy_is_calculated_in_float16():
    logits = (torch.randn(2, 3, 50) * 4).half().requires_grad_()
    labels = torch.randint(0, 50, (2, 3))
    half, _ = vocab_parallel_cross_entropy(logits, labels, vocab_size=50, dtype=torch.float16)
    exact, _ = vocab_parallel_cross_entropy(logits, labels, vocab_size=50)
    assert (half.dtype, exact.dtype) == (torch.float16, torch.float32)
    assert not torch.equal(half.float(), exact)
    torch.testing.assert_close(half.float(), exact, atol=0.02, rtol=0.01)
    ones = torch.ones(2, 3)
    torch.testing.assert_close(
        *(torch.autograd.grad(x, logits, ones.to(x.dtype))[0] for x in (half, exact)), atol=0.01, rtol=0.02
    )
    loss = LMLoss(50, dtype=torch.float16)(logits, (labels, ones))
    torch.testing.assert_close(loss, half.float().sum())


def test_a_float16_heads_gradients_are_made_when_the_loss_is_scaled():
    hidden = (torch.randn(4, 2, WIDTH) * 0.1).half().requires_grad_()
    head = LMHead(VOCAB, WIDTH, init=None).half()
    torch.nn.init.normal_(head.weight, std=1e-6)
    targets = (torch.randint(0, VOCAB, (2, 4)), torch.full((2, 4), 1 / 8))
    loss = head(hidden, targets, LMLoss(VOCAB))
    (gradient,) = torch.autograd.grad(loss * 2.0**15, hidden)
    assert (gradient != 0).float().mean() > 0.9


def rank_by_rank(is_fused: bool, **options) -> float:
    operator = neox_kernels.cross_entropy.fused if is_fused else None
    group: Group = create_groups(2, 0).model
    hidden, weight, labels, weights = inputs()
    rows = -(-VOCAB // 2)
    mine = functional.pad(weight.detach(), (0, 0, 0, 2 * rows - VOCAB))
    mine = mine[group.rank * rows : (group.rank + 1) * rows].clone().requires_grad_()
    options |= {"vocab_size": VOCAB, "z_terms": [], "chunk_rows": 10}
    loss = projected_cross_entropy(hidden, mine, labels, weights, group=group, operator=operator, **options)
    expected = projected_cross_entropy(hidden, weight, labels, weights, group=SINGLE_RANK, **options)
    terms = options["z_terms"]
    assert len(terms) == (2 if options.get("z_loss") else 0)
    torch.testing.assert_close(terms[:1], terms[1:], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    part, my_rows = gradients(loss, hidden, mine)
    dist.all_reduce(part)
    whole, all_rows = gradients(expected, hidden, weight)
    torch.testing.assert_close(part, whole, atol=1e-6, rtol=1e-6)
    held = all_rows[group.rank * rows : (group.rank + 1) * rows]
    torch.testing.assert_close(my_rows[: len(held)], held, atol=1e-6, rtol=1e-6)
    assert not my_rows[len(held) :].any()
    return float(loss)


@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "z_loss": 0.02}], ids=["", "softcap and z-loss"])
def test_two_ranks_share_a_vocabulary_that_does_not_divide(is_fused, options):
    first, second = run_ranks(rank_by_rank, size=2, is_fused=is_fused, **options)
    assert first == second
