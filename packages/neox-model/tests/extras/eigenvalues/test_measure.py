"""Eigenvalues of the Hessian, against the eigenvalues of a dense Hessian."""

from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from neox_config.schema.sections.engine import Eigenvalue
from neox_model.assembly.model import build_model
from neox_model.extras.eigenvalues.measure import Eigenvalues, EigenvaluesCallback, largest_eigenvalue
from neox_model.parallel.groups import SINGLE_PROCESS, SINGLE_RANK
from neox_model.train.data.batch import Batch, as_batch, weighted_by_micro_batch
from neox_model.train.state import StepReport, TrainState
from support.distributed import run_ranks
from support.refusals import refused
from support.runs import CountingStep, Record, a_run, train
from support.settings import resolved_from, specs_from

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 4, "num_attention_heads": 2, "seq_length": 6}
VOCAB = 7
EXACT = {"tol": 1e-8, "max_iter": 1000}


def model_of(**settings: Any):
    return build_model(*specs_from(SMALL | settings), SINGLE_PROCESS, vocab_size=VOCAB)


def batches_of(count: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    batches = (as_batch(torch.randint(VOCAB, (2, 7), generator=generator)) for _ in range(count))
    return list(weighted_by_micro_batch(batches, count, torch.device("cpu")))


def section(**values: Any) -> Eigenvalue:
    return Eigenvalue.model_validate({"enabled": True, "layer_name": "layers", "layer_num": 2} | values)


def dense(model, layer: int, batches: list[Batch]) -> Tensor:
    """The Hessian with respect to the parameters of a layer, one row after the other, in float64."""
    named = {path: value.detach().double() for path, value in model.named_parameters()}
    paths = [path for path in named if path.startswith(f"stack.{layer + 1}.")]
    flat = torch.cat([named[path].flatten() for path in paths])

    def loss(values: Tensor) -> Tensor:
        parts = values.split([named[path].numel() for path in paths])
        given = named | {path: part.view_as(named[path]) for path, part in zip(paths, parts, strict=True)}
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            logits = functional_call(model, given, (batch.inputs,))[..., :VOCAB]
            total = total + torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten())
            total = total + model.loss_fn.z_loss * logits.logsumexp(-1).square().mean()
        return total / len(batches)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found: Tensor = torch.autograd.functional.hessian(loss, flat)  # type: ignore[assignment]
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"z_loss": 0.5, "logit_softcap": 0.5, "attention_sinks": True, "attention_softcap": 0.5},
    ],
)
def test_eigenvalues_are_those_of_the_dense_hessian(settings):
    model, batches = model_of(**settings), batches_of(2)
    found = Eigenvalues(model, section(**EXACT), data=SINGLE_RANK, seed=1, dtype=torch.float64)
    found.measure(batches)
    assert model.training
    for layer in range(2):
        values = torch.linalg.eigvalsh(dense(model.eval(), layer, batches))
        expected = values[values.abs().argmax()]
        assert float(found.values[layer]) == pytest.approx(float(expected), rel=1e-4)
    in_float32 = Eigenvalues(model, section(max_iter=1000, tol=1e-5), data=SINGLE_RANK, seed=1)
    in_float32.measure(batches)
    torch.testing.assert_close(in_float32.values, found.values, rtol=1e-3, atol=1e-4)
    in_16_bit = Eigenvalues(model.bfloat16(), section(**EXACT), data=SINGLE_RANK, seed=1)
    in_16_bit.measure(batches)
    torch.testing.assert_close(in_16_bit.values, found.values, rtol=0.05, atol=1e-3)
    assert all(value.grad is None for value in model.parameters())


def test_layers_with_the_same_weights_have_the_same_eigenvalue():
    resolved = resolved_from(SMALL | {"num_layers": 4, "num_unique_layers": 2})
    model = build_model(resolved.model, resolved.run, SINGLE_PROCESS, vocab_size=VOCAB)
    owners = tuple(layer.owner for layer in resolved.model.layers)
    found = Eigenvalues(model, section(layer_num=4), data=SINGLE_RANK, seed=1, owners=owners)
    found.measure(batches_of(1))
    first, second, *shared = found.values.tolist()
    assert 0.0 != first != second != 0.0
    assert shared == [first, second]


def test_the_power_iteration_stops_at_the_tolerance_or_the_maximum():
    matrix = torch.diag(torch.tensor([1.0, -3.0, 2.0], dtype=torch.float64))
    seen: list[float] = []

    def run(**limits: Any) -> float:
        seen.clear()
        return largest_eigenvalue(
            lambda vector: [matrix @ vector[0]],
            [torch.ones(3, dtype=torch.float64)],
            stability=0.0,
            on_iteration=lambda number, value: seen.append(value),
            **limits,
        )

    assert run(max_iter=200, tol=1e-12) == pytest.approx(-3.0)
    assert 20 < len(seen) < 100
    assert run(max_iter=200, tol=0.5) == seen[-1]
    assert len(seen) < 10
    run(max_iter=4, tol=1e-12)
    assert len(seen) == 4


def on_ranks(is_local: bool) -> list[float]:
    from neox_model.parallel.topology import create_groups

    group = create_groups(1, 0).data
    mine = batches_of(2)[group.rank : group.rank + 1]
    found = Eigenvalues(
        model_of(), section(**EXACT), data=SINGLE_RANK if is_local else group, seed=1, dtype=torch.float64
    )
    found.measure(mine)
    return found.values.tolist()


def test_replicas_measure_the_eigenvalues_of_the_whole_batch():
    whole = Eigenvalues(model_of(), section(**EXACT), data=SINGLE_RANK, seed=1, dtype=torch.float64)
    whole.measure(batches_of(2))
    for values in run_ranks(on_ranks, size=2, is_local=False):
        assert values == pytest.approx(whole.values.tolist(), rel=1e-6)
    # The fault: each replica measures its own batch.
    assert run_ranks(on_ranks, size=2, is_local=True)[0] != pytest.approx(whole.values.tolist(), rel=1e-3)


def test_eigenvalues_are_measured_every_few_iterations_and_batches_are_trained_on(monkeypatch):
    found = Eigenvalues(model_of(), section(), data=SINGLE_RANK, seed=1)
    measured, seen, record = [], [], Record()
    monkeypatch.setattr(found, "measure", lambda batches: measured.append(batches))

    class Remembering(CountingStep):
        accumulation, weighting = 3, staticmethod(weighted_by_micro_batch)

        def __call__(self, batches):
            seen.append(list(islice(batches, self.accumulation)))
            return StepReport(loss=None, grad_norm=None, skipped=False, tokens=0)

    run = a_run(
        EigenvaluesCallback(found, interval=2),
        state=TrainState(last_iteration=3, samples_per_iteration=1),
        step=Remembering(),
        engine=SimpleNamespace(device=torch.device("cpu")),
        writers=[record],
    )
    batches = batches_of(9)
    train(run, batches)
    assert seen == [batches[:3], batches[3:6], batches[6:]]
    assert [len(each) for each in measured] == [3, 3]
    assert record.metrics == [(1, found.metrics()), (3, found.metrics())]


def test_periods_grow_with_the_share_of_the_largest_eigenvalue():
    found = Eigenvalues(model_of(), section(layer_num=2), data=SINGLE_RANK, seed=1)
    assert found.factor("layers.0.mlp.up") == 1
    found.values.copy_(torch.tensor([-4.0, 1.0]))
    assert [found.factor(f"layers.{layer}.mlp.up") for layer in range(3)] == [5, 2, 1]
    assert found.metrics() == {
        "Train/Eigenvalues/ModelBlockParam_0": -4.0,
        "Train/Eigenvalues/ModelBlockParam_1": 1.0,
    }


def test_a_function_without_second_derivative_is_reported():
    from neox_model.errors import ModelError

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, gradient):
            return gradient

    model = model_of()
    activation = model.stack[1].mlp.activation
    model.stack[1].mlp.activation = lambda value: Once.apply(activation(value))
    found = Eigenvalues(model, section(), data=SINGLE_RANK, seed=1)
    with refused(ModelError, "no second derivative"):
        found.measure(batches_of(1))


def test_a_lack_of_memory_is_not_reported_as_a_missing_derivative(monkeypatch):
    found = Eigenvalues(model_of(), section(), data=SINGLE_RANK, seed=1)

    def fail(*arguments: Any) -> float:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(found, "_of_layer", fail)
    with pytest.raises(torch.OutOfMemoryError):
        found.measure(batches_of(1))
