"""Sequences that are decoded together: each enters a free slot at any time, and leaves it at any time.

The sequences in use are always in the first slots: when one leaves, the last one takes its slot. Every rank
of a copy of the model calls the same methods with the same arguments. Nothing is read back from the device
before `read`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neox_model.generate.forward import Forward
from neox_model.generate.sampling import Sampling, SamplingTable
from neox_model.layers.cache import Chunk, NextTokens, spans_of

__all__ = ["Admission", "Batch", "NewTokens"]

# Tokens of one call for prompts, with padding: the largest activations are those of this many tokens.
_PROMPT_TOKENS = 8192
# Padding that is computed for the sake of fewer calls, as a share of the tokens.
_PADDING = 0.25
# Stored rows that are read although they are hidden, in one part of the slots (see spans_of).
_HIDDEN_ROWS = 512


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that enters a batch.

    Args:
        prompt: token ids, at least one.
        sampling: how its tokens are chosen.
        maximum_tokens: maximum number of tokens to generate.
    """

    prompt: Sequence[int]
    sampling: Sampling
    maximum_tokens: int


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens of one sequence since the last `read`, with their log-probabilities."""

    tokens: list[int]
    log_probabilities: list[float]


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
        if not recompute:
            forward.allocate(slots=slots, capacity=capacity)
        device = forward.device
        self._tokens_BT = torch.zeros(slots, capacity + 1, dtype=torch.int64, device=device)
        self._last_B = torch.zeros(slots, dtype=torch.int64, device=device)
        self._table = SamplingTable(slots=slots, draws=capacity, vocab_size=forward.vocab_size, device=device)
        # Number of tokens of each sequence in use.
        self._lengths: list[int] = []
        self._unread: list[tuple[int, Tensor, Tensor]] = []

    @property
    def size(self) -> int:
        """Return the number of sequences in use."""
        return len(self._lengths)

    def admit(self, admissions: Sequence[Admission]) -> list[int]:
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

    def _admit_group(self, admissions: Sequence[Admission]) -> None:
        first, lengths = self.size, [len(one.prompt) for one in admissions]
        longest = max(lengths)
        rows = [[*one.prompt, *[0] * (longest - len(one.prompt))] for one in admissions]
        slots = slice(first, first + len(rows))
        self._tokens_BT[slots, :longest] = torch.tensor(rows, device=self._forward.device)
        self._last_B[slots] = torch.tensor(lengths, device=self._forward.device) - 1
        for slot, one in enumerate(admissions, start=first):
            prompt_T = self._tokens_BT[slot, : len(one.prompt)]
            self._table.set(slot, one.sampling, prompt_T, one.maximum_tokens)
        self._lengths += lengths
        self._advance(first, len(self._lengths), None if self._recompute else Chunk(first))

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

    def _advance(self, first: int, stop: int, window: Chunk | NextTokens | None) -> None:
        """Append a token to the sequences of these slots."""
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
        logits_BV = self._forward.logits_after(tokens_BS, positions_BS, index_B, window)
        if logits_BV is None:
            chosen_B = torch.zeros_like(last_B), torch.zeros(len(last_B), device=last_B.device)
        else:
            chosen_B = self._table.choose(logits_BV, first)
        tokens_B, log_probabilities_B = self._forward.share(*chosen_B)
        last_B += 1
        self._tokens_BT[first:stop].scatter_(1, last_B.unsqueeze(1), tokens_B.unsqueeze(1))
        for slot in range(first, stop):
            self._lengths[slot] += 1
        self._unread.append((first, tokens_B, log_probabilities_B))

    def read(self) -> list[NewTokens]:
        """Return the new tokens of every sequence, by slot; one transfer from the device."""
        found = [NewTokens([], []) for _ in self._lengths]
        if self._unread:
            tokens = torch.cat([tokens_B for _, tokens_B, _ in self._unread]).tolist()
            values = torch.cat([values_B for _, _, values_B in self._unread]).tolist()
            places = [first + row for first, tokens_B, _ in self._unread for row in range(len(tokens_B))]
            for place, token, value in zip(places, tokens, values, strict=True):
                found[place].tokens.append(token)
                found[place].log_probabilities.append(value)
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
            self._lengths[place] = length
        self._lengths.pop()


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
