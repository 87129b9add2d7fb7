"""The largest eigenvalues of the Hessian of the loss, one per layer, by power iteration.

    v <- H v / (|H v| + stability),    eigenvalue = v . H v

The Hessian is that of the mean loss of an iteration's whole batch, without dropout, with respect to the
parameters of one layer. It is never stored: a product with it is the gradient of a gradient's product.

Source: arXiv:1905.03696, section 3.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from math import floor
from typing import Any, Self

import torch
from torch import Tensor, distributed, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from neox_config.extras.compression.facts import PERIODS_PER_EIGENVALUE
from neox_config.schema.sections.engine import Eigenvalue
from neox_model.assembly.as_sequential import SequentialModel
from neox_model.assembly.compilation import dense_attention
from neox_model.checkpoint.names import is_score
from neox_model.errors import ModelError
from neox_model.parallel.groups import Group
from neox_model.parallel.logical import LogicalState, named_logical_parameters
from neox_model.train.callbacks.measurement import Measurement
from neox_model.train.data.batch import Batch
from neox_model.train.run import Run
from neox_model.train.state import StepReport
from neox_model.train.step import TrainStep

__all__ = ["Eigenvalues", "EigenvaluesCallback", "largest_eigenvalue"]

logger = logging.getLogger(__name__)

Vector = list[Tensor]


def largest_eigenvalue(
    product: Callable[[Vector], Vector],
    start: Vector,
    *,
    max_iter: int,
    tol: float,
    stability: float,
    on_iteration: Callable[[int, float], None] = lambda number, value: None,
) -> float:
    """Return the eigenvalue of largest magnitude of a symmetric matrix.

    Args:
        product: multiplies a vector, a list of tensors, by the matrix.
        start: the first vector.
        max_iter: largest number of products.
        tol: relative change of the eigenvalue at which it is accepted.
        stability: added to norms before dividing by them.
        on_iteration: called with the number of each iteration, from 1, and its eigenvalue.
    """
    vector, value, before = _normalized(start, stability), 1.0, 0.0
    for number in range(1, max_iter + 1):
        if value == 0.0 or abs(value - before) < tol * abs(value):
            break
        multiplied = product(vector)
        before, value = value, float(_inner(multiplied, vector))
        on_iteration(number, value)
        vector = _normalized(multiplied, stability)
    return value


def _inner(one: Vector, other: Vector) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(one, other, strict=True)]).sum()


def _normalized(vector: Vector, stability: float) -> Vector:
    norm = _inner(vector, vector).sqrt() + stability
    return [each / norm for each in vector]


class Eigenvalues:
    """Measures the eigenvalues of a model in training, and keeps the last ones.

    Args:
        model: the model, whole on this rank.
        section: the parameters.
        data: the data-parallel ranks, over which losses are averaged.
        seed: random seed of the first vectors.
        dtype: dtype in which they are computed; weights are converted.
        owners: first layer with the same weights, for each layer, whose eigenvalue is also that layer's; None
            if no weights are shared.

    Attributes:
        values: one per layer, float64; zeros before the first measurement.
    """

    def __init__(
        self,
        model: nn.Module,
        section: Eigenvalue,
        *,
        data: Group,
        seed: int,
        dtype: torch.dtype = torch.float32,
        owners: Sequence[int] | None = None,
    ) -> None:
        assert isinstance(model, SequentialModel), "a rule refuses pipelines"
        self._owners = range(section.layer_num) if owners is None else owners
        self.values = torch.zeros(section.layer_num, dtype=torch.float64)
        self._model, self._section, self._data = model, section, data
        self._seed, self._dtype = seed, dtype

    def states(self) -> list[LogicalState]:
        """Return what a checkpoint contains of it."""
        count = len(self.values)
        return [
            LogicalState(
                name="eigenvalues/values",
                shape=(count,),
                slices=((0, count),),
                start=0,
                values=self.values,
                is_split_over_model=False,
            )
        ]

    def metrics(self) -> dict[str, float]:
        """Return the last eigenvalues by the names under which they are logged."""
        return {
            f"Train/Eigenvalues/ModelBlockParam_{layer}": value
            for layer, value in enumerate(self.values.tolist())
        }

    def factor(self, matrix: str) -> int:
        """Return by how much the period of a matrix's bits grows: 1 + floor(4 e), e of its layer.

        e is the magnitude of the layer's eigenvalue over the largest one of all layers; 1 if it is 0.
        """
        layer = int(matrix.split(".")[1])
        largest = float(self.values.abs().max())
        if layer >= len(self.values) or largest == 0.0:
            return 1
        share = abs(float(self.values[layer])) / largest
        return 1 + floor(PERIODS_PER_EIGENVALUE * (share or 1.0))

    def measure(self, batches: Sequence[Batch]) -> None:
        """Compute the eigenvalues for an iteration's micro-batches. Collective over the data group.

        Raises:
            ModelError: an operator of the model has no second derivative.
        """
        section, was_training = self._section, self._model.training
        try:
            self._model.eval()
            with dense_attention(self._model), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
                for layer, owner in enumerate(self._owners[: section.layer_num]):
                    is_owner = owner == layer
                    self.values[layer] = self._of_layer(layer, batches) if is_owner else self.values[owner]
        except (torch.OutOfMemoryError, distributed.DistError):
            raise
        except RuntimeError as error:
            raise ModelError(
                f"eigenvalue.enabled: an operator of the model has no second derivative: {error}; use "
                "reference implementations (no fused operators), or set eigenvalue.enabled: false"
            ) from error
        finally:
            self._model.train(was_training)

    def _of_layer(self, layer: int, batches: Sequence[Batch]) -> float:
        section, prefix = self._section, f"layers.{layer}."
        logical = {id(value): name for name, value in named_logical_parameters(self._model)}
        weights = {path: value.detach().to(self._dtype) for path, value in self._model.named_parameters()}
        paths = [
            path
            for path, value in self._model.named_parameters()
            # Scores of pruned matrices are not weights of the layer.
            if value.requires_grad
            and logical[id(value)].startswith(prefix)
            and not is_score(logical[id(value)])
        ]
        for path in paths:
            weights[path].requires_grad_()
        generator = torch.Generator().manual_seed(self._seed + layer)
        first = [torch.randn(weights[path].shape, generator=generator) for path in paths]

        def product(vector: Vector) -> Vector:
            return self._product(weights, [weights[path] for path in paths], vector, batches)

        def log(number: int, value: float) -> None:
            if section.verbose:
                logger.info("layer %d, power iteration %d: eigenvalue %.6g", layer, number, value)

        return largest_eigenvalue(
            product,
            [value.to(weights[path]) for value, path in zip(first, paths, strict=True)],
            max_iter=section.max_iter,
            tol=section.tol,
            stability=section.stability,
            on_iteration=log,
        )

    def _product(
        self, weights: Mapping[str, Tensor], chosen: Vector, vector: Vector, batches: Sequence[Batch]
    ) -> Vector:
        """Return the product of the Hessian with a vector, averaged over micro-batches and replicas."""
        for each in chosen:
            each.grad = torch.zeros_like(each)
        for batch in batches:
            # The loss by operators that have second derivatives.
            labels_BS, loss_mask_BS = batch.targets
            logits_BSV = functional_call(self._model, dict(weights), (batch.inputs,))
            own_loss: Any = self._model.loss_fn
            logits_NV = logits_BSV[..., : own_loss.vocab_size].flatten(0, 1)
            losses_N = functional.cross_entropy(logits_NV, labels_BS.flatten(), reduction="none")
            if own_loss.z_loss:
                losses_N = losses_N + own_loss.z_loss * logits_NV.logsumexp(-1).square()
            loss = (losses_N * loss_mask_BS.float().flatten()).sum()
            gradients = torch.autograd.grad(loss, chosen, create_graph=True)
            # `torch.autograd.grad` would leave out functions without second derivative without an error.
            (_inner(list(gradients), vector) / len(batches)).backward()
        total = [each.grad for each in chosen if each.grad is not None]
        for each in total if self._data.size > 1 else ():
            distributed.all_reduce(each, group=self._data.process_group)
            each /= self._data.size
        return total


class EigenvaluesCallback(Measurement):
    """Measures eigenvalues before some iterations, the first one included, for their micro-batches.

    Args:
        eigenvalues: measures.
        interval: iterations between measurements.
    """

    def __init__(self, eigenvalues: Eigenvalues, *, interval: int) -> None:
        super().__init__(interval, after=1)
        self.eigenvalues = eigenvalues

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if `eigenvalue` is enabled."""
        section = run.config.engine.eigenvalue
        if not section.enabled:
            return None
        owners = [
            number if layer.owner is None else layer.owner
            for number, layer in enumerate(run.resolved.model.layers)
        ]
        seed, data = run.config.training.seed, run.groups.data
        return cls(
            Eigenvalues(run.model, section, data=data, seed=seed, owners=owners),
            interval=section.gas_boundary_resolution,
        )

    def states(self) -> list[LogicalState]:
        """Return the last eigenvalues."""
        return self.eigenvalues.states()

    def around_step(self, step: TrainStep, batches: Iterator[Batch]) -> StepReport:
        """Measure if it is due, and train on the next micro-batches."""
        if not self.is_due(self.run.state.iteration + 1):
            return step(batches)
        taken = list(islice(batches, self.run.step.accumulation))
        self.eigenvalues.measure(
            list(self.run.step.weighting(iter(taken), len(taken), self.run.engine.device))
        )
        return step(iter(taken))

    def measure(self) -> Mapping[str, float]:
        """Return the last eigenvalues by the names under which they are logged."""
        return self.eigenvalues.metrics()
