"""Perplexity, bits per byte and perplexity per character of documents, with confidence intervals.

Each document is scored by itself, after end-of-document, or after the token that the tokenizer adds to the
beginning of each text: its tokens are divided into parts of `seq_length` tokens, and each token is predicted
once.

The interval is that of a ratio (sum of log-likelihoods to sum of tokens, bytes or characters) in the normal
approximation: the variance is that of the residuals of the units, which are documents, or the parts of
documents if there are fewer than 30 documents. Limits of a perplexity are exponentials of those of the loss.
Source: W. G. Cochran, Sampling Techniques, section 2.11 (the ratio estimator).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np

from neox_config.errors import ConfigError
from neox_data.tokenizers import Tokenizer
from neox_model.metrics.progress_lines import ProgressLines
from neox_model.parallel.groups import Groups
from neox_model.scoring.documents import ScoredDocument, read_documents
from neox_model.scoring.endings import gather_in_sections
from neox_model.scoring.scorer import Score, Scorer, rolling_parts
from neox_model.scoring.texts import TextEncoder

__all__ = ["CONFIDENCE", "Perplexity", "Ratio", "measure_perplexity", "ratio_of"]

CONFIDENCE = 0.95
_DEVIATIONS = 1.959963984540054
# With fewer documents, the parts of documents are the units of the interval.
_ENOUGH_DOCUMENTS = 30
# Documents that are scored in one call, so that parts of similar length are batched together.
_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of sums, with its confidence interval.

    Args:
        value: the ratio.
        low: lower limit; None: there are fewer than two units.
        high: upper limit.
    """

    value: float
    low: float | None
    high: float | None

    def mapped(self, function: Callable[[float], float]) -> "Ratio":
        """Return the ratio with an increasing function applied to the value and the limits."""
        limits = (None if limit is None else function(limit) for limit in (self.low, self.high))
        return Ratio(function(self.value), *limits)

    def __str__(self) -> str:
        limits = "" if self.low is None else f" [{self.low:.4f}, {self.high:.4f}]"
        return f"{self.value:.4f}{limits}"


def _exponential(value: float) -> float:
    """Return the exponential; infinity if it is too large for a float."""
    return math.inf if value >= 700 else math.exp(value)


def ratio_of(numerators: np.ndarray, denominators: np.ndarray) -> Ratio:
    """Return the ratio of two sums over units, with its confidence interval."""
    total, count = float(denominators.sum()), len(numerators)
    value = float(numerators.sum()) / total
    if count < 2:
        return Ratio(value, None, None)
    residuals = numerators - value * denominators
    margin = _DEVIATIONS * math.sqrt(count / (count - 1) * float((residuals**2).sum())) / total
    return Ratio(value, value - margin, value + margin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """Results over all documents.

    Args:
        source: what was scored.
        documents: number of documents that were scored.
        empty_documents: number of documents without tokens, which are left out.
        tokens: number of tokens; each is predicted once.
        num_bytes: of the texts, UTF-8.
        characters: of the texts.
        units: what the intervals are computed over: "documents" or "parts".
        loss: natural logarithms per token.
        bits_per_byte: binary logarithms per byte.
        loss_per_character: natural logarithms per character.
    """

    source: str
    documents: int
    empty_documents: int
    tokens: int
    num_bytes: int
    characters: int
    units: str
    loss: Ratio
    bits_per_byte: Ratio
    loss_per_character: Ratio

    def rows(self, *, per_character: bool) -> dict[str, Ratio]:
        """Return the results by name.

        Args:
            per_character: include the perplexity per character, exp(loss x tokens / characters).
        """
        rows = {
            "loss": self.loss,
            "perplexity": self.loss.mapped(_exponential),
            "bits_per_byte": self.bits_per_byte,
        }
        if per_character:
            rows["perplexity_per_character"] = self.loss_per_character.mapped(_exponential)
        return rows

    def counts(self) -> dict[str, Any]:
        """Return what was read, by name."""
        return {
            "source": self.source,
            "documents": self.documents,
            "empty_documents": self.empty_documents,
            "tokens": self.tokens,
            "bytes": self.num_bytes,
            "characters": self.characters,
        }


def measure_perplexity(
    source: str, scorer: Scorer, tokenizer: Tokenizer, groups: Groups, *, limit: int | None = None
) -> Perplexity:
    """Score the documents of a source. Collective over all ranks; every replica scores its share.

    Args:
        source: an indexed dataset or text files, see `read_documents`.
        scorer: computes log-likelihoods.
        tokenizer: the model's tokenizer.
        groups: this job's process groups.
        limit: number of documents; None: all.

    Raises:
        DataError: the documents cannot be read.
        ConfigError: there are no tokens to score.
        EvaluationEndedError: the model's output is not finite, or a signal requested the end.
    """
    replica = groups.data
    documents = read_documents(source, tokenizer, limit=limit, first=replica.rank, every=replica.size)
    prefix = TextEncoder(tokenizer).prefix
    # One rank of each replica counts.
    is_counted = groups.model.rank == 0 and groups.pipe.rank == 0

    turns = (made if is_counted else [] for made in _score_documents(documents, scorer, prefix))
    found = sorted(chain.from_iterable(gather_in_sections(groups.control, turns)))
    scored = [document for document in found if document.tokens]
    if not scored:
        raise ConfigError(
            f"eval-data {source} contains no text to score (documents that were read: {len(found):,}); "
            "choose other data"
        )
    has_enough = len(scored) >= _ENOUGH_DOCUMENTS
    units = np.array(
        [document.whole for document in scored]
        if has_enough
        else [part for document in scored for part in document.parts]
    )
    losses = -units[:, 0]
    return Perplexity(
        source=source,
        documents=len(scored),
        empty_documents=len(found) - len(scored),
        tokens=sum(document.tokens for document in scored),
        num_bytes=sum(document.num_bytes for document in scored),
        characters=sum(document.characters for document in scored),
        units="documents" if has_enough else "parts",
        loss=ratio_of(losses, units[:, 1]),
        bits_per_byte=ratio_of(losses, units[:, 2]).mapped(lambda loss: loss / math.log(2)),
        loss_per_character=ratio_of(losses, units[:, 3]),
    )


@dataclass(frozen=True, slots=True, order=True)
class _Document:
    """Number and size of a document; (log-likelihood, tokens, bytes, characters) of its parts."""

    number: int
    tokens: int
    num_bytes: int
    characters: int
    parts: tuple[tuple[float, float, float, float], ...]

    @property
    def whole(self) -> tuple[float, int, int, int]:
        """Return the log-likelihood, tokens, bytes and characters of the document."""
        return (math.fsum(part[0] for part in self.parts), self.tokens, self.num_bytes, self.characters)


def _score_documents(
    documents: Iterator[tuple[int, ScoredDocument]], scorer: Scorer, prefix: int
) -> Iterator[list[_Document]]:
    """Yield after each forward pass: nothing, or the documents that are complete."""
    progress, read = ProgressLines("eval-data", "tokens scored", None), 0
    while several := list(islice(documents, _AT_ONCE)):
        parts = [
            rolling_parts(document.tokens, prefix=prefix, seq_length=scorer.seq_length)
            for _, document in several
        ]
        scores: dict[int, Score] = {}
        flat = [part for each in parts for part in each]
        read += sum(len(part.continuation) for part in flat)
        share = several[-1][1].share_read if len(several) == _AT_ONCE else 1.0
        if share:
            progress.expect(round(read / share), is_estimate=share < 1)
        for turn in scorer.turns(flat):
            scores |= dict(turn)
            progress.add(sum(len(flat[number].continuation) for number, _ in turn))
            yield []
        numbers, found = iter(range(len(scores))), []
        for (number, document), own in zip(several, parts, strict=True):
            sums = [scores[next(numbers)].log_likelihood for _ in own]
            counts = [len(part.continuation) for part in own]
            total, sizes = sum(counts), (document.num_bytes, document.num_characters)
            # Bytes and characters are divided over the parts in proportion to their tokens.
            shares = tuple(
                (value, count, sizes[0] * count / total, sizes[1] * count / total)
                for value, count in zip(sums, counts, strict=True)
            )
            found.append(_Document(number, len(document.tokens), *sizes, shares))
        yield found
