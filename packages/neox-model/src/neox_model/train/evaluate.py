"""Compute the validation and test loss of the current model, and what is counted along with it."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from neox_config.pluralize import pluralize
from neox_config.schema.sections.generation import GenerationSection
from neox_data.tokenizers import Tokenizer
from neox_model.engine.contract import IsStopping, never
from neox_model.metrics.progress_lines import ProgressLines
from neox_model.parallel.collectives import all_reduce
from neox_model.parallel.control import all_gather_object
from neox_model.parallel.groups import Group, Groups
from neox_model.scoring.endings import STOPPED, StoppedError
from neox_model.train.data.batch import Batch
from neox_model.train.data.streams import Stream

__all__ = ["AVERAGED", "EVALUATIONS", "PARTS", "Evaluation", "Evaluator", "character_count", "retrieval_loss"]

logger = logging.getLogger(__name__)

PARTS = {"valid": "validation", "test": "test"}
"""Part of the data -> the name of its evaluation, in the order in which results are shown."""

AVERAGED = "_ema"
"""End of the names of evaluations of averaged weights, and of their parts."""

EVALUATIONS = {part + end: name + end for part, name in PARTS.items() for end in ("", AVERAGED)}
"""Part of the data, and of averaged weights -> the name of its evaluation, in the same order."""


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


def character_count(
    section: GenerationSection, tokenizer: Tokenizer, groups: Groups
) -> Callable[[Sequence[Sequence[int]]], float] | None:
    """Return a function that computes the tokens per character of sequences, if `char_level_ppl` is set.

    It counts those of all replicas, for the perplexity per character. Collective over all ranks.
    """
    if not section.char_level_ppl:
        return None

    def tokens_per_character(sequences: Sequence[Sequence[int]]) -> float:
        mine = (0, 0)
        if groups.model.rank == 0 and groups.pipe.rank == 0:
            mine = sum(map(len, sequences)), sum(len(tokenizer.decode(tokens)) for tokens in sequences)
        tokens, characters = map(sum, zip(*all_gather_object(groups.control, mine), strict=True))
        return tokens / characters if characters else 0.0

    return tokens_per_character


class RetrievalLoss(Protocol):
    """A loss that counts the queries whose block is among the best `k`, for each `k` of `best`."""

    best: Sequence[int]
    hits: list[Tensor]
    group: Group


def retrieval_loss(model: nn.Module) -> RetrievalLoss | None:
    """Return the loss of a model that counts accuracies of retrieval; None if none are reported."""
    loss = getattr(model, "loss_fn", None)
    return loss if getattr(loss, "best", ()) else None


class Evaluator:
    """Runs evaluations, each on its own range of a part's samples.

    Args:
        mean_loss: function of (stream, number of micro-batches, whether to end early) that returns the mean
            loss over their tokens; collective.
        open_stream: part -> function of the first sample that opens the stream there.
        iterations: iterations per evaluation, each of `accumulation` micro-batches.
        accumulation: micro-batches per iteration.
        samples_per_iteration: over all data-parallel ranks.
        characters: computes the tokens per character of all sequences; None: they are not counted.
        retrieval: the loss that counts the queries whose block is among the best of its micro-batch; None:
            they are not counted.

    Attributes:
        results: the last evaluation of each part, and of averaged weights (see `EVALUATIONS`).
        samples: number of samples that one evaluation reads.
    """

    def __init__(
        self,
        mean_loss: Callable[[Iterator[Batch], int, IsStopping], Tensor],
        open_stream: Mapping[str, Callable[[int], Stream]],
        *,
        iterations: int,
        accumulation: int,
        samples_per_iteration: int,
        characters: Callable[[Sequence[Sequence[int]]], float] | None = None,
        retrieval: RetrievalLoss | None = None,
    ) -> None:
        self._characters = characters
        self._retrieval = retrieval
        self.results: dict[str, Evaluation] = {}
        self.samples = iterations * samples_per_iteration
        self._mean_loss = mean_loss
        self._open_stream = open_stream
        self._micro_batches = iterations * accumulation

    def has(self, part: str) -> bool:
        """Return True if the part has samples to evaluate on."""
        return self._micro_batches > 0 and part in self._open_stream

    def evaluate(
        self, part: str, first: int, is_stopping: IsStopping = never, *, end: str = ""
    ) -> Evaluation:
        """Evaluate on the samples of a part starting at sample `first`. Collective over all ranks.

        Args:
            part: the part.
            first: number of the first sample.
            is_stopping: ends the evaluation.
            end: added to the part in `results`.

        Raises:
            StoppedError: `is_stopping`, which is asked between micro-batches, returned True.
        """
        is_stopped = False

        def should_stop() -> bool:
            nonlocal is_stopped
            is_stopped = is_stopping()
            return is_stopped

        sequences: list[list[int]] = []
        if self._retrieval is not None:
            self._retrieval.hits.clear()
        name, count = EVALUATIONS.get(part + end, part), self._micro_batches
        with closing(self._open_stream[part](first)) as stream:
            # The first micro-batch may take minutes: nothing else is logged until it is done.
            logger.info("%s: starting, %s", name, pluralize(count, "micro-batch", "micro-batches"))
            batches = ProgressLines(name, "micro-batches", count).track(stream)
            batches = batches if self._characters is None else _noted(batches, sequences)
            loss = float(self._mean_loss(batches, count, should_stop))
        if is_stopped:
            raise StoppedError(STOPPED)
        ratio = None if self._characters is None else self._characters(sequences)
        accuracies = {} if self._retrieval is None else _accuracies(self._retrieval)
        self.results[part + end] = Evaluation(loss, ratio, accuracies)
        return self.results[part + end]


def _accuracies(loss: RetrievalLoss) -> dict[int, float]:
    """Return the share of the counted queries that were found, for each k. Collective over the data group."""
    *hits, queries = all_reduce(sum(loss.hits[1:], loss.hits[0]), loss.group).tolist()
    return {k: hit / queries for k, hit in zip(loss.best, hits, strict=True)}


def _noted(batches: Iterator[Batch], sequences: list[list[int]]) -> Iterator[Batch]:
    """Yield the batches, and add their tokens to a list."""
    for batch in batches:
        sequences += batch.tokens_BS.tolist()
        yield batch
