"""Gradients that are sums over tokens, in 16 bit, against the same sums in float64."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import neox_kernels
from neox_model.extras.gmlp.layer import SpatialGate
from neox_model.extras.retrieval.head import RetrievalHead
from neox_model.layers.attention import DenseCore
from neox_model.layers.embedding import Embedding
from neox_model.layers.lm_head import LMHead, LMLoss
from neox_model.layers.mlp import GatedMLP
from neox_model.layers.norms import NORMS
from neox_model.layers.positions import BucketPosition, LearnedPosition
from neox_model.layers.residual_layer import add_dropped
from neox_model.parallel.linear import ColumnParallelLinear, RowParallelLinear
from neox_model.parallel.low_rank import LowRank
from neox_model.parallel.sequence import gather_input
from neox_model.parallel.token_sums import layer_norm
from neox_model.parallel.vocab_embedding import VocabParallelEmbedding

WIDTH, WIDE, VOCABULARY, BATCH = 32, 48, 8, 4


def fill(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.normal_(std=0.2, generator=generator)


class Calls(nn.Module):
    """Calls a function of (modules, input), so that every case is one module."""

    def __init__(self, call: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.call = call
        self.inner = nn.ModuleDict(modules)

    def forward(self, given: Tensor) -> Tensor:
        return self.call(given, **self.inner)


class OfOperator(nn.Module):
    """Calls the reference or the fused form of an operator with its example's vectors as parameters."""

    def __init__(self, operator: Any, form: str) -> None:
        super().__init__()
        self.operate = getattr(operator, form)
        self.example = operator.comparable_example or operator.example
        _, *others = self.example((2, WIDTH), torch.float32, torch.device("cpu"))
        self.vectors = nn.ParameterList(each for each in others if is_vector(each))

    def forward(self, hidden: Tensor) -> Tensor:
        _, *others = self.example(tuple(hidden.shape), hidden.dtype, hidden.device)
        vectors = iter(self.vectors)
        # Of what has the shape of the input, the gate and the residual, every form gets the same.
        given = [
            next(vectors) if is_vector(each) else hidden if isinstance(each, Tensor) else each
            for each in others
        ]
        result = self.operate(hidden, *given)
        return result if isinstance(result, Tensor) else result[-1]


def is_vector(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.ndim == 1


def hidden(rows: int) -> Tensor:
    """Return rows with means that are not zero, so that sums grow with the number of rows."""
    batch = BATCH if rows % BATCH == 0 else 1
    return torch.randn(rows // batch, batch, WIDTH) + 0.3


def tokens(rows: int) -> Tensor:
    batch = BATCH if rows % BATCH == 0 else 1
    return torch.randint(VOCABULARY, (batch, rows // batch))


def norm(name: str, **options: Any) -> Callable[[int], tuple[nn.Module, Tensor]]:
    return lambda rows: (Calls(lambda x, norm: norm(x), norm=NORMS[name](WIDTH, **options)), hidden(rows))


def linear(rows: int, make: Any = ColumnParallelLinear, **options: Any) -> tuple[nn.Module, Tensor]:
    def call(x: Tensor, matrix: nn.Module) -> Tensor:
        output, bias = matrix(x)
        # A bias that is returned is added with the residual.
        return add_dropped(output, bias, output.detach(), 0.0, training=True) if bias is not None else output

    return Calls(call, matrix=make(WIDTH, WIDE, init=fill, **options)), hidden(rows)


def adding_product(rows: int) -> tuple[nn.Module, Tensor]:
    def call(x: Tensor, matrix: nn.Module) -> Tensor:
        entry = gather_input(x.requires_grad_(), matrix.group)
        entry.adds_gradients = True
        return matrix(entry.whole, entry)[0]

    return Calls(call, matrix=ColumnParallelLinear(WIDTH, WIDE, init=fill)), hidden(rows)


def recomputed_product(rows: int) -> tuple[nn.Module, Tensor]:
    mlp = GatedMLP(
        WIDTH, WIDE, activation=functional.silu, init=fill, output_init=fill, recomputes_product=True
    )
    # The gradients of the other matrices are products with values that were rounded to 16 bit before.
    for matrix in (mlp.up, mlp.gate):
        matrix.requires_grad_(False)
    return Calls(lambda x, mlp: mlp(x)[0], mlp=mlp), hidden(rows)


def adapter(rows: int) -> tuple[nn.Module, Tensor]:
    matrix = ColumnParallelLinear(WIDTH, WIDE, init=fill, adapter=LowRank(rank=1, alpha=1.0))
    return Calls(lambda x, adapter: adapter(x), adapter=matrix.adapter), hidden(rows)


def word_embedding(rows: int) -> tuple[nn.Module, Tensor]:
    return VocabParallelEmbedding(VOCABULARY, WIDTH, init=fill), tokens(rows)


def positions(rows: int) -> tuple[nn.Module, Tensor]:
    return LearnedPosition(VOCABULARY, WIDTH, init=fill), tokens(rows)


def broadcast_positions(rows: int) -> tuple[nn.Module, Tensor]:
    embedding = Embedding(
        VOCABULARY, WIDTH, init=fill, position=lambda: LearnedPosition(rows, WIDTH, init=fill)
    )
    return Calls(lambda x, embedding: embedding(x.t()), embedding=embedding), tokens(rows)


def relative_bias(rows: int) -> tuple[nn.Module, Tensor]:
    length = max(1, int(rows**0.5))

    def position() -> nn.Module:
        return BucketPosition(num_buckets=8, max_distance=32, heads=2, head_width=16, init=fill)

    def call(x: Tensor, core: DenseCore) -> Tensor:
        scores = core.bias_of_scores(length, length, x.device).to(x.dtype)
        return scores.masked_fill(core.hidden_keys(length, length, None, x.device)[0], 0.0)

    return Calls(call, core=DenseCore(position=position)), hidden(1)


def gate(rows: int, *, has_documents: bool) -> tuple[nn.Module, Tensor]:
    # A position's sum is over the batch and the width.
    batch, length = max(1, rows // WIDTH), 3
    documents = torch.tensor([0, 0, 1]).expand(batch, length) if has_documents else None
    module = SpatialGate(WIDTH, length, norm=lambda width: nn.Identity())
    given = torch.randn(length, batch, WIDTH) + 0.3
    return Calls(lambda x, gate: gate(torch.ones_like(x), x, documents), gate=module), given


def retrieval(rows: int) -> tuple[nn.Module, Tensor]:
    return RetrievalHead(WIDE, WIDTH, init=fill), torch.randn(2, rows, WIDTH) + 0.3


def loss(rows: int) -> tuple[nn.Module, Tensor]:
    labels = tokens(rows)
    head, of_hidden = LMHead(VOCABULARY, WIDTH, init=fill), LMLoss(VOCABULARY, chunk_rows=100)
    targets = labels, torch.ones(labels.shape)
    # Small logits, because the loss of logits that were rounded to 16 bit has other gradients.
    return Calls(lambda x, head: head(x / 64, targets, of_hidden), head=head), hidden(rows)


def tied(rows: int) -> tuple[nn.Module, Tensor]:
    table = VocabParallelEmbedding(VOCABULARY, WIDTH, init=fill)
    head = LMHead(VOCABULARY, WIDTH, init=fill, weight=table.weight)
    return Calls(lambda x, table, head: head(table(x.t())), table=table, head=head), tokens(rows)


OPERATORS = ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm", "bias_gelu", "bias_swiglu")
OPERATORS += ("bias_geglu", "bias_dropout_add")

CASES: dict[str, Callable[[int], tuple[nn.Module, Tensor]]] = {
    **{name: norm(name) for name in NORMS if name != "non_parametric_layernorm"},  # It has no weights.
    "layernorm without bias": norm("layernorm", bias=False),
    "linear": linear,
    "linear whose bias is added later": lambda rows: linear(rows, skip_bias=True),
    "row-parallel linear": lambda rows: linear(rows, RowParallelLinear),
    "product that adds gradients": adding_product,
    "product that is computed again": recomputed_product,
    "adapter": adapter,
    "word embedding": word_embedding,
    "position embedding": positions,
    "position embedding of all samples": broadcast_positions,
    "relative bias": relative_bias,
    "gate": lambda rows: gate(rows, has_documents=False),
    "gate of documents": lambda rows: gate(rows, has_documents=True),
    "retrieval head": retrieval,
    "loss": loss,
    "tied embedding": tied,
    **{
        f"{form} {name}": lambda rows, name=name, form=form: (
            OfOperator(getattr(neox_kernels, name), form),
            hidden(rows),
        )
        for name in OPERATORS
        for form in ("reference", "fused")
    },
}


def gradients(module: nn.Module, given: Tensor) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    result = module(given)
    above = torch.randn(result.shape, generator=generator) * 0.1 + 0.05
    # The gradient above is of 16-bit values in both.
    result.backward(above.bfloat16().to(result.dtype))
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            yield name, parameter.grad


@pytest.mark.parametrize("rows", [1, 100, 2048, 16384])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_over_many_tokens_are_as_exact_as_over_one(case, dtype, rows):
    torch.manual_seed(5)
    module, given = CASES[case](rows)
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=0.5, std=0.2)
    module = module.to(dtype)
    exact = copy.deepcopy(module).double()
    wide = given
    if given.is_floating_point():
        given = given.to(dtype)
        wide = given.double()
    expected = dict(gradients(exact, wide))
    found = dict(gradients(module, given))
    assert found.keys() == expected.keys() != set()
    errors = {
        name: float((found[name].double() - expected[name]).norm() / expected[name].norm()) for name in found
    }
    assert max(errors.values()) <= 0.005, errors


def layer_norm_of(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(2)
    values = (torch.randn(2048, WIDTH) + 0.3, torch.rand(WIDTH) + 0.5, torch.randn(WIDTH))
    return tuple(value.bfloat16().to(dtype).requires_grad_() for value in values)  # type: ignore[return-value]


def test_second_derivatives_of_a_layer_norm():
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        given = layer_norm_of(dtype)
        first = torch.autograd.grad(layer_norm(*given, 1e-5).pow(2).sum(), given, create_graph=True)
        found.append(torch.autograd.grad(sum(each.pow(2).sum() for each in first[1:]), given))
    for here, exact in zip(*found, strict=True):
        assert float((here.double() - exact).norm() / exact.norm()) <= 0.02


def test_a_compiled_layer_norm_has_the_same_gradients():
    given = layer_norm_of(torch.bfloat16)
    compiled = torch.compile(layer_norm, backend="aot_eager", fullgraph=True)
    results = [norm(*given, 1e-5) for norm in (layer_norm, compiled)]
    torch.testing.assert_close(*results, rtol=0.01, atol=0.01)
    here, there = (torch.autograd.grad(result.sum(), given) for result in results)
    for mine, theirs in zip(here[1:], there[1:], strict=True):
        assert float((mine - theirs).float().norm() / theirs.float().norm()) <= 0.005


@pytest.mark.parametrize("trained", [(True, False, False), (False, True, True)])
def test_only_requested_gradients_of_a_layer_norm_are_computed(trained):
    given = [
        value.detach().requires_grad_(is_trained)
        for value, is_trained in zip(layer_norm_of(torch.bfloat16), trained, strict=True)
    ]
    layer_norm(*given, 1e-5).pow(2).sum().backward()
    assert tuple(value.grad is not None for value in given) == trained
    assert all(value.grad is None or value.grad.dtype == torch.bfloat16 for value in given)


def test_an_exported_embedding_is_one_operation():
    table = LearnedPosition(VOCABULARY, WIDTH, init=fill).bfloat16()
    exported = torch.export.export(table, (torch.zeros(4, 1, dtype=torch.int64),))
    operations = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert operations == [torch.ops.aten.embedding.default]
