"""Validation and test loss of the model as it is."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from neox_model.train.batch import Batch

__all__ = ["BatchStream", "Evaluation", "Evaluator"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one evaluation.

    Args:
        loss: plain mean of the micro-batches' losses, per token.
    """

    loss: float

    @property
    def perplexity(self) -> float:
        """The exponential of the loss, infinite where that is too large for a float."""
        return math.inf if self.loss >= 700 else math.exp(self.loss)

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}, perplexity {self.perplexity:.4g}"


class BatchStream(Protocol):
    """Micro-batches from some place on, until closed."""

    def __iter__(self) -> Iterator[Batch]:
        """Itself."""

    def __next__(self) -> Batch:
        """The next micro-batch."""

    def close(self) -> None:
        """Stop reading ahead."""


class Evaluator:
    """Runs evaluations, each on its own stretch of a part's data.

    Args:
        mean_loss: the mean loss of so many micro-batches of a stream; collective.
        open_stream: part -> function of the first sample, giving the stream from there.
        iterations: of `accumulation` micro-batches each, per evaluation.
        accumulation: micro-batches per iteration.
        samples_per_iteration: over all data-parallel ranks.

    Attributes:
        results: the last evaluation of each part.
        samples: that one evaluation reads.
    """

    def __init__(
        self,
        mean_loss: Callable[[Iterator[Batch], int], Tensor],
        open_stream: Mapping[str, Callable[[int], BatchStream]],
        *,
        iterations: int,
        accumulation: int,
        samples_per_iteration: int,
    ) -> None:
        self.results: dict[str, Evaluation] = {}
        self.samples = iterations * samples_per_iteration
        self._mean_loss = mean_loss
        self._open_stream = open_stream
        self._iterations = iterations
        self._accumulation = accumulation

    def has(self, part: str) -> bool:
        """Whether there is anything to evaluate on."""
        return self._iterations > 0 and part in self._open_stream

    def evaluate(self, part: str, first: int) -> Evaluation:
        """Loss on the samples of a part from number `first` on. Collective over all ranks."""
        with closing(self._open_stream[part](first)) as stream:
            loss = self._mean_loss(stream, self._iterations * self._accumulation)
        self.results[part] = Evaluation(float(loss))
        return self.results[part]
