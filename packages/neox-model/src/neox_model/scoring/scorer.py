"""Compute log-likelihoods of continuations, in batches of different lengths.

Every rank of a copy of the model makes the same calls with the same arguments, and gets the same results.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from neox_model.errors import ModelError
from neox_model.generate.engine import not_finite
from neox_model.generate.forward import Forward
from neox_model.scoring.endings import STOPPED, NotFiniteError, StoppedError

__all__ = ["Part", "Score", "Scorer", "rolling_parts"]


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens whose log-likelihood is wanted.

    Args:
        context: the tokens before them, at least one; if there is no room for all, the last ones are used.
        continuation: the tokens.
    """

    context: Sequence[int]
    continuation: Sequence[int]


@dataclass(frozen=True, slots=True)
class Score:
    """What the model computes for a continuation.

    Args:
        log_likelihood: sum over its tokens, natural logarithm.
        is_greedy: True if each token is the most likely one of the tokenizer's entries.
    """

    log_likelihood: float
    is_greedy: bool


class Scorer:
    """Computes log-likelihoods with one copy of the model. `Forward` states which entries count.

    Args:
        forward: the model's forward pass.
        seq_length: maximum number of tokens of the model's input.
        batch_tokens: maximum number of tokens of one forward pass, with padding; one sequence is always
            processed.
        is_stopping: returns whether to end, the same on all ranks of the copy, which call it together.

    Attributes:
        forward: the model's forward pass.
        seq_length: maximum number of tokens of the model's input.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        seq_length: int,
        batch_tokens: int,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.forward, self.seq_length = forward, seq_length
        self._is_stopping = is_stopping
        self._batch_tokens = batch_tokens

    def turns(self, parts: Sequence[Part]) -> Iterator[list[tuple[int, Score]]]:
        """Yield (number, score) of the parts that one forward pass scores, longest ones first.

        Raises:
            ModelError: as `check`.
            NotFiniteError: the output of the model is not finite.
            StoppedError: a signal requested the end.
        """
        self.check(parts)
        # The input of the model and, behind it, one more token.
        rows = [
            [*part.context[-(self.seq_length + 1 - len(part.continuation)) :], *part.continuation]
            for part in parts
        ]
        order = sorted(range(len(parts)), key=lambda number: -len(rows[number]))
        while order:
            self.continue_or_stop()
            count = max(1, self._batch_tokens // (len(rows[order[0]]) - 1))
            numbers, order = order[:count], order[count:]
            counts = [len(parts[one].continuation) for one in numbers]
            scores = self._score([rows[one] for one in numbers], counts)
            yield list(zip(numbers, scores, strict=True))

    def check(self, parts: Sequence[Part]) -> None:
        """Raise ModelError if a continuation is empty or longer than `seq_length`, or a context is empty."""
        for part in parts:
            if not part.continuation or not part.context:
                raise ModelError("a text to score has no tokens; remove it from the task", code="no-tokens")
            if len(part.continuation) > self.seq_length:
                raise ModelError(
                    f"a text to score has {len(part.continuation):,} tokens, more than seq-length "
                    f"({self.seq_length:,}); remove it from the task, or use a model with a larger seq-length"
                )

    def continue_or_stop(self) -> None:
        """Raise StoppedError if a signal requested the end. Collective over the ranks of the copy."""
        if self._is_stopping():
            raise StoppedError(STOPPED)

    def _score(self, rows: Sequence[Sequence[int]], scored: Sequence[int]) -> list[Score]:
        """Score the last tokens of each row in one forward pass.

        Args:
            rows: the tokens.
            scored: number of tokens at the end of each row that are scored.
        """
        longest, device = len(rows[0]) - 1, self.forward.device
        padded = [[*row[:-1], *[0] * (longest + 1 - len(row))] for row in rows]
        tokens_BS = torch.tensor(padded, device=device)
        places = [
            (number, index)
            for number, (row, count) in enumerate(zip(rows, scored, strict=True))
            for index in range(len(row) - 1 - count, len(row) - 1)
        ]
        rows_N, columns_N = torch.tensor(places, device=device).unbind(1)
        targets = [token for row, count in zip(rows, scored, strict=True) for token in row[-count:]]
        values_N, is_greedy_N = self.forward.log_probabilities(
            tokens_BS,
            (rows_N, columns_N),
            torch.tensor(targets, device=device),
            torch.tensor([len(row) - 1 for row in rows], device=device),
        )
        sums = [float(values.sum()) for values in values_N.double().cpu().split(list(scored))]
        if not all(map(math.isfinite, sums)):
            raise NotFiniteError(not_finite())
        greedy = [bool(part.all()) for part in is_greedy_N.cpu().split(list(scored))]
        return [Score(*both) for both in zip(sums, greedy, strict=True)]


def rolling_parts(tokens: Sequence[int], *, prefix: int, seq_length: int) -> list[Part]:
    """Divide a text into parts in which each token occurs once, as the evaluation harness does.

    Each part has `seq_length` tokens, the last one those that are left, with as many tokens before them as
    fit. The first token of the others follows one token of the part before.

    Args:
        tokens: the text.
        prefix: the token before the text.
        seq_length: maximum number of tokens of the model's input.
    """
    parts = []
    whole = [prefix, *tokens]
    for first in range(1, len(whole), seq_length):
        stop = min(first + seq_length, len(whole))
        parts.append(Part(whole[max(0, stop - 1 - seq_length) : first], whole[first:stop]))
    return parts
