"""Sequences that are decoded together: each enters a free slot at any time, and leaves it at any time.

The sequences in use are always in the first slots: when one leaves, the last one takes its slot. Every rank
of a copy of the model calls the same methods with the same arguments. Nothing is read back from the device
before `read`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from neox_model.generate.forward import Forward
from neox_model.generate.sampling import GREEDY, Sampling, SamplingTable, most_likely
from neox_model.layers.cache import Chunk, NextTokens, spans_of

__all__ = ["Batch", "NewTokens", "Request", "Scores"]

# Tokens of one call for prompts, with padding: the largest activations are those of this many tokens.
_PROMPT_TOKENS = 8192
# Padding that is computed for the sake of fewer calls, as a share of the tokens.
_PADDING = 0.25
# Stored rows that are read although they are hidden, in one part of the slots (see spans_of).
_HIDDEN_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for the continuation of a prompt.

    Args:
        prompt: token ids; at least one to enter a batch. Empty for an engine: start a new document.
        maximum_tokens: maximum number of tokens to generate, at least 1; 0 only scores the prompt.
        sampling: how tokens are chosen.
        stop_strings: the text ends before the first of them. For an engine.
        top_count: number of most likely tokens to report with each token; at most the vocabulary.
        scores_prompt: report the log-probabilities of the prompt's tokens.
        has_logits: report the logits of each token.
    """

    prompt: Sequence[int]
    maximum_tokens: int
    sampling: Sampling = GREEDY
    stop_strings: tuple[str, ...] = ()
    top_count: int = 0
    scores_prompt: bool = False
    has_logits: bool = False

    def __post_init__(self) -> None:
        assert self.maximum_tokens or self.scores_prompt, "a request asks for tokens or for scores"

    @property
    def most_read(self) -> int:
        """The most tokens that the model may read for it: all but the last, which follows what it read."""
        return len(self.prompt) + self.maximum_tokens - 1


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of consecutive tokens, under the model (temperature 1, no filter, no penalty).

    Args:
        log_probabilities: of the tokens.
        top: for each token, the most likely ones with their log-probabilities; as many as were requested.
    """

    log_probabilities: list[float]
    top: list[list[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens of one sequence since the last `read`.

    Args:
        tokens: their ids.
        log_probabilities: of these tokens.
        top: for each token, the most likely ones with their log-probabilities; as many as were requested.
        prompt: scores of the prompt's tokens behind the first, if they were requested and not read before.
        logits: for each token, the logits from which it was chosen, before penalty and temperature, if they
            were requested.
    """

    tokens: list[int]
    log_probabilities: list[float]
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt: Scores | None = None
    logits: list[list[float]] = field(default_factory=list)


class Batch:
    """Decodes up to `slots` sequences together.

    Args:
        forward: the model's forward pass.
        slots: number of sequences.
        capacity: tokens of the longest sequence, prompt included.
        recompute: recompute the whole sequences for each token instead of storing keys and values.
    """

    def __init__(self, forward: Forward, *, slots: int, capacity: int, recompute: bool = False) -> None:
        self.slots, self.capacity = slots, capacity
        self._forward = forward
        self._recompute = recompute
        if recompute:
            forward.free()
        else:
            forward.allocate(slots=slots, capacity=capacity)
        device = forward.device
        self._tokens_BT = torch.zeros(slots, capacity + 1, dtype=torch.int64, device=device)
        self._last_B = torch.zeros(slots, dtype=torch.int64, device=device)
        self._most_B = torch.zeros(slots, dtype=torch.int64, device=device)
        self._table = SamplingTable(slots=slots, draws=capacity, vocab_size=forward.vocab_size, device=device)
        # Number of tokens of each sequence in use.
        self._lengths: list[int] = []
        self._top_counts: list[int] = []
        self._have_logits: list[bool] = []
        # What was chosen for consecutive slots: number of the first slot, ids_B, log-probabilities_B, the
        # most likely ids_BC with their log-probabilities_BC, and the logits_BV, if any has them.
        self._unread: list[tuple[int, Tensor, Tensor, Tensor, Tensor, Tensor]] = []
        # By slot; read with the first token.
        self._prompt_scores: dict[int, Scores] = {}

    @property
    def size(self) -> int:
        """Return the number of sequences in use."""
        return len(self._lengths)

    def admit(self, admissions: Sequence[Request]) -> list[int]:
        """Give each sequence a slot, and choose its first token. Returns the places in the order of `read`.

        Everything must have been read before.
        """
        assert not self._unread, "read() comes before admit()"
        assert len(admissions) <= self.slots - self.size, "there are not enough free slots"
        places = [0] * len(admissions)
        order = sorted(range(len(admissions)), key=lambda number: len(admissions[number].prompt))
        for group in _groups([len(admissions[number].prompt) for number in order]):
            numbers = [order[index] for index in group]
            for place, number in enumerate(numbers, start=self.size):
                places[number] = place
            self._admit_group([admissions[number] for number in numbers])
        return places

    def _admit_group(self, admissions: Sequence[Request]) -> None:
        first, lengths = self.size, [len(one.prompt) for one in admissions]
        longest = max(lengths)
        rows = [[*one.prompt, *[0] * (longest - len(one.prompt))] for one in admissions]
        slots = slice(first, first + len(rows))
        self._tokens_BT[slots, :longest] = torch.tensor(rows, device=self._forward.device)
        self._last_B[slots] = torch.tensor(lengths, device=self._forward.device) - 1
        most = [one.most_read for one in admissions]
        self._most_B[slots] = torch.tensor(most, device=self._forward.device)
        for slot, one in enumerate(admissions, start=first):
            prompt_T = self._tokens_BT[slot, : len(one.prompt)]
            self._table.set(slot, one.sampling, prompt_T, one.maximum_tokens)
        self._lengths += lengths
        self._top_counts += [one.top_count for one in admissions]
        self._have_logits += [one.has_logits for one in admissions]
        hidden_SBD = self._advance(first, len(self._lengths), None if self._recompute else Chunk(first))
        for slot, one in enumerate(admissions, start=first):
            if one.scores_prompt:
                count = len(one.prompt) - 1
                hidden_ND = None if hidden_SBD is None else hidden_SBD[:count, slot - first]
                targets_N = self._tokens_BT[slot, 1 : count + 1]
                values_N, _, *top = self._forward.scores(hidden_ND, targets_N, top_count=one.top_count)
                self._prompt_scores[slot] = Scores(values_N.tolist(), _pairs(*top))

    def step(self) -> None:
        """Choose the next token of every sequence; the caller ensures that each has room for one."""
        if self._recompute:
            self._advance(0, self.size, None)
            return
        positions = [length - 1 for length in self._lengths]
        # A copy, because the spans keep parts of it.
        positions_B = self._last_B[: self.size].clone()
        spans = spans_of(positions, positions_B, max_waste=_HIDDEN_ROWS)
        self._advance(0, self.size, NextTokens(positions_B, spans))

    def _advance(self, first: int, stop: int, window: Chunk | NextTokens | None) -> Tensor | None:
        """Append a token to the sequences of these slots. Returns the head's input on the last stage."""
        last_B = self._last_B[first:stop]
        if isinstance(window, NextTokens):
            positions_BS = window.positions.unsqueeze(1)
            tokens_BS = self._tokens_BT[first:stop].gather(1, positions_BS)
            index_B = torch.zeros_like(last_B)
        else:
            longest = max(self._lengths[first:stop])
            tokens_BS = self._tokens_BT[first:stop, :longest]
            positions_BS = torch.arange(longest, device=last_B.device).expand(stop - first, -1)
            index_B = last_B
        hidden_SBD = self._forward.hidden_after(tokens_BS, positions_BS, window, self._most_B[first:stop])
        count = max(self._top_counts[first:stop])
        values_B = torch.zeros(stop - first, device=last_B.device)
        values_BC = values_B[:, None].repeat(1, count)
        entries = self._forward.vocab_size * any(self._have_logits[first:stop])
        kept_BV = values_B[:, None].repeat(1, entries)
        found = [torch.zeros_like(last_B), values_B, values_BC.long(), values_BC, kept_BV]
        if hidden_SBD is not None:
            rows = torch.arange(stop - first, device=last_B.device)
            logits_BV, total_B = self._forward.logits(hidden_SBD[index_B, rows])
            tokens_B, chosen_B = self._table.choose(logits_BV, first)
            found[:2] = tokens_B, chosen_B - total_B
            found[2:4] = most_likely(logits_BV, total_B, count) if count else found[2:4]
            found[4] = logits_BV[:, :entries].float()
        tokens_B, log_probabilities_B, ids_BC, values_BC, kept_BV = self._forward.share(found)
        last_B += 1
        self._tokens_BT[first:stop].scatter_(1, last_B.unsqueeze(1), tokens_B.unsqueeze(1))
        for slot in range(first, stop):
            self._lengths[slot] += 1
        self._unread.append((first, tokens_B, log_probabilities_B, ids_BC, values_BC, kept_BV))
        return hidden_SBD

    def read(self) -> list[NewTokens]:
        """Return the new tokens of every sequence, by slot; one transfer from the device."""
        found = [NewTokens([], [], [], self._prompt_scores.get(slot)) for slot in range(self.size)]
        self._prompt_scores.clear()
        if self._unread:
            firsts, tokens, values, ids, top_values, logits = zip(*self._unread, strict=True)
            places = [
                first + row
                for first, of_all in zip(firsts, tokens, strict=True)
                for row in range(len(of_all))
            ]
            tops = [row for both in zip(ids, top_values, strict=True) for row in _pairs(*both)]
            flat = torch.cat(tokens).tolist(), torch.cat(values).tolist()
            rows = [row for of_all in logits for row in of_all.tolist()]
            for place, token, value, top, row in zip(places, *flat, tops, rows, strict=True):
                if self._have_logits[place]:
                    found[place].logits.append(row)
                found[place].tokens.append(token)
                found[place].log_probabilities.append(value)
                found[place].top.append(top[: self._top_counts[place]])
        self._unread.clear()
        return found

    def release(self, place: int) -> None:
        """Free a slot; the sequence in the last slot in use takes it."""
        assert not self._unread, "read() comes before release()"
        last = self.size - 1
        if place != last:
            length = self._lengths[last]
            self._forward.move(last, place, length)
            self._table.move(last, place)
            self._tokens_BT[place] = self._tokens_BT[last]
            self._last_B[place] = self._last_B[last]
            self._most_B[place] = self._most_B[last]
            self._lengths[place] = length
            self._top_counts[place] = self._top_counts[last]
            self._have_logits[place] = self._have_logits[last]
        self._lengths.pop()
        self._top_counts.pop()
        self._have_logits.pop()


def _pairs(ids_TC: Tensor, values_TC: Tensor) -> list[list[tuple[int, float]]]:
    """Return rows of ids with their values."""
    rows = zip(ids_TC.tolist(), values_TC.tolist(), strict=True)
    return [list(zip(ids, values, strict=True)) for ids, values in rows]


def _groups(lengths: Sequence[int]) -> list[range]:
    """Divide prompts, ordered by length, into groups that are processed in one call each."""
    groups: list[range] = []
    first, total = 0, 0
    for stop, length in enumerate(lengths):
        padded = length * (stop + 1 - first)
        if stop > first and (padded > _PROMPT_TOKENS or padded > (1 + _PADDING) * (total + length)):
            groups.append(range(first, stop))
            first, total = stop, 0
        total += length
    return [*groups, range(first, len(lengths))] if lengths else []
