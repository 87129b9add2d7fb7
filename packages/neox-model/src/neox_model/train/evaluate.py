"""Compute the validation and test loss of the current model."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from neox_config.counted import counted
from neox_model.engine.contract import IsStopping, never
from neox_model.metrics.progress_lines import ProgressLines
from neox_model.scoring.endings import STOPPED, StoppedError
from neox_model.train.characters import CharacterCount, noted
from neox_model.train.data.batch import Batch

__all__ = ["PARTS", "BatchStream", "Evaluation", "Evaluator"]

logger = logging.getLogger(__name__)

PARTS = {"valid": "validation", "test": "test"}
"""Part of the data -> the name of its evaluation, in the order in which results are shown."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one evaluation.

    Args:
        loss: mean over the tokens that count in the loss, nats per token; NaN if there are none.
        tokens_per_character: of the texts; None if it is not counted.
        accuracies: share of the queries whose block is among the best k, by k; empty without retrieval.
    """

    loss: float
    tokens_per_character: float | None = None
    accuracies: Mapping[int, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """Return the exponential of the loss, infinity if it is too large for a float."""
        return _exponential(self.loss)

    @property
    def perplexity_per_character(self) -> float | None:
        """Return exp(loss x tokens / characters), GPT-NeoX's definition; None if it is not counted."""
        return (
            None if self.tokens_per_character is None else _exponential(self.loss * self.tokens_per_character)
        )

    def metrics(self, name: str) -> dict[str, float]:
        """Return the results as metrics of an evaluation with this name."""
        found = {f"loss/{name}": self.loss, f"perplexity/{name}": self.perplexity}
        found |= {f"top{k}_accuracy/{name}": share for k, share in self.accuracies.items()}
        per_character = self.perplexity_per_character
        return found if per_character is None else found | {f"perplexity_per_character/{name}": per_character}

    def __str__(self) -> str:
        if math.isnan(self.loss):
            return (
                "loss nan: no token of the samples counts in the loss, or the model computes NaN; check the "
                "labels, or increase eval-iters"
            )
        found = f"loss {self.loss:.4f}, perplexity {self.perplexity:.4g}"
        found += "".join(f", top {k} accuracy {share:.1%}" for k, share in self.accuracies.items())
        per_character = self.perplexity_per_character
        return found if per_character is None else f"{found}, perplexity per character {per_character:.4g}"


def _exponential(value: float) -> float:
    return math.inf if value >= 700 else math.exp(value)


class BatchStream(Protocol):
    """An iterator over micro-batches that must be closed."""

    def __iter__(self) -> Iterator[Batch]:
        """Return the stream itself."""

    def __next__(self) -> Batch:
        """Return the next micro-batch."""

    def close(self) -> None:
        """Stop prefetching."""


class AccuracyCount(Protocol):
    """Counts the queries of an evaluation whose block is among the best ones."""

    def begin(self) -> None:
        """Delete the counts of earlier evaluations."""

    def of_all_ranks(self) -> Mapping[int, float]:
        """Return the share of the queries since `begin`, for each number of blocks. Collective."""


class Evaluator:
    """Runs evaluations, each on its own range of a part's samples.

    Logs that one starts, unless the one before of the same part was quick.

    Args:
        mean_loss: function of (stream, number of micro-batches, whether to end early) that returns the mean
            loss over their tokens; collective.
        open_stream: part -> function of the first sample that opens the stream there.
        iterations: iterations per evaluation, each of `accumulation` micro-batches.
        accumulation: micro-batches per iteration.
        samples_per_iteration: over all data-parallel ranks.
        characters: counts characters for the perplexity per character; None: it is not computed.
        accuracies: counts the queries whose block was found; None: they are not counted.

    Attributes:
        results: the last evaluation of each part.
        samples: number of samples that one evaluation reads.
    """

    def __init__(
        self,
        mean_loss: Callable[[Iterator[Batch], int, IsStopping], Tensor],
        open_stream: Mapping[str, Callable[[int], BatchStream]],
        *,
        iterations: int,
        accumulation: int,
        samples_per_iteration: int,
        characters: CharacterCount | None = None,
        accuracies: AccuracyCount | None = None,
    ) -> None:
        self._characters = characters
        self._accuracies = accuracies
        self.results: dict[str, Evaluation] = {}
        self.samples = iterations * samples_per_iteration
        self._mean_loss = mean_loss
        self._open_stream = open_stream
        self._iterations = iterations
        self._accumulation = accumulation
        self._quick: set[str] = set()

    def has(self, part: str) -> bool:
        """Return True if the part has samples to evaluate on."""
        return self._iterations > 0 and part in self._open_stream

    def evaluate(self, part: str, first: int, is_stopping: IsStopping = never) -> Evaluation:
        """Evaluate on the samples of a part starting at sample `first`. Collective over all ranks.

        Raises:
            StoppedError: `is_stopping`, which is asked between micro-batches, returned True.
        """
        is_stopped = False

        def should_stop() -> bool:
            nonlocal is_stopped
            is_stopped = is_stopping()
            return is_stopped

        sequences: list[list[int]] = []
        if self._accuracies is not None:
            self._accuracies.begin()
        with closing(self._open_stream[part](first)) as stream:
            count = self._iterations * self._accumulation
            name = PARTS.get(part, part)
            if part not in self._quick:
                # The first micro-batch may take minutes: nothing else is logged until it is done.
                logger.info("%s: starting, %s", name, counted(count, "micro-batch", "micro-batches"))
            progress = ProgressLines(name, "micro-batches", count)
            batches = progress.track(stream)
            batches = batches if self._characters is None else noted(batches, sequences)
            loss = float(self._mean_loss(batches, count, should_stop))
        if is_stopped:
            raise StoppedError(STOPPED)
        (self._quick.discard if progress.is_slow else self._quick.add)(part)
        ratio = None if self._characters is None else self._characters.tokens_per_character(sequences)
        accuracies = {} if self._accuracies is None else self._accuracies.of_all_ranks()
        self.results[part] = Evaluation(loss, ratio, accuracies)
        return self.results[part]
