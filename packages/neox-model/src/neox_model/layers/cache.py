"""What generation stores of earlier tokens, and which tokens a call of the model processes.

A cache has slots, one per sequence; the sequences in use are the first ones. A call of the model processes
either a `Chunk`, consecutive tokens of sequences with equally many earlier tokens (prompts), or `NextTokens`,
one token of every sequence, each at its own position. Nothing of the size of queries by keys is stored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

__all__ = ["Cached", "Chunk", "LayerCache", "NextTokens", "Span", "spans_of"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of consecutive slots.

    Shorter sequences are padded at their end: later tokens do not change the results of earlier ones, and
    what is stored of padding is overwritten before it is visible.

    Args:
        first: first slot.
        start: number of earlier tokens, the same in all slots.
    """

    first: int = 0
    start: int = 0


@dataclass(slots=True)
class Span:
    """Consecutive slots, one new token each, that attend to the same number of stored rows.

    Args:
        first: first slot.
        stop: slot after the last one.
        num_keys: stored rows that are read, the longest sequence's number with the new token.
        positions: position of each new token, [B].
        is_even: all positions are num_keys - 1, so that no row is hidden.
    """

    first: int
    stop: int
    num_keys: int
    positions: Tensor
    is_even: bool
    _bias: Tensor | None = field(default=None, init=False)

    def hidden(self) -> Tensor:
        """Return hidden_BT, True for rows after the new token, which are not part of the sequence."""
        return torch.arange(self.num_keys, device=self.positions.device) > self.positions.unsqueeze(1)

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return bias_B11T, minus infinity for hidden rows; None if none is hidden. Shared by the layers."""
        if self.is_even:
            return None
        if self._bias is None:
            zero_BT = torch.zeros(
                self.stop - self.first, self.num_keys, dtype=dtype, device=self.positions.device
            )
            self._bias = zero_BT.masked_fill(self.hidden(), float("-inf"))[:, None, None]
        return self._bias


@dataclass(frozen=True, slots=True)
class NextTokens:
    """One new token of each of the first slots.

    Args:
        positions: position of each token, [B].
        spans: the slots in parts.
    """

    positions: Tensor
    spans: Sequence[Span]


def spans_of(places: Sequence[int], positions_B: Tensor, *, max_waste: int) -> list[Span]:
    """Divide slots into spans, so that short sequences do not read the rows of long ones.

    Args:
        places: position of each slot's new token.
        positions_B: the same, on the device.
        max_waste: hidden rows that the slots of a span may read in total.
    """
    spans: list[Span] = []
    first = 0
    while first < len(places):
        stop, longest, total = first, 0, 0
        while stop < len(places):
            grown, added = max(longest, places[stop]), total + places[stop]
            if grown * (stop + 1 - first) - added > max_waste:
                break
            longest, total, stop = grown, added, stop + 1
        is_even = total == longest * (stop - first)
        spans.append(Span(first, stop, longest + 1, positions_B[first:stop], is_even))
        first = stop
    return spans


class Cached(nn.Module):
    """A module whose results depend on earlier tokens.

    Attributes:
        cache: rows of earlier tokens, if the module receives only the tokens behind them; None: it receives
            whole sequences.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache: LayerCache | None = None


class LayerCache:
    """Stored rows of one layer (keys and values), in memory that is allocated once.

    Args:
        slots: number of sequences.
        capacity: tokens of the longest sequence.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        self._slots, self._capacity = slots, capacity
        self._memory: tuple[Tensor, ...] = ()
        self.window: Chunk | NextTokens = Chunk()

    @property
    def start(self) -> int:
        """Return the position of the first token of a chunk."""
        return self.window.start if isinstance(self.window, Chunk) else 0

    @property
    def position_ids(self) -> Tensor | None:
        """Return position_ids_SB of the tokens if they differ between slots, else None."""
        return self.window.positions.unsqueeze(0) if isinstance(self.window, NextTokens) else None

    def store(self, *rows_SBNK: Tensor) -> None:
        """Store rows of the current tokens."""
        if not self._memory:
            # Zeros, because rows that are read but hidden are multiplied by 0.
            self._memory = tuple(
                row.new_zeros((self._slots, row.shape[2], self._capacity, row.shape[3])) for row in rows_SBNK
            )
        length, batch = rows_SBNK[0].shape[:2]
        for memory, new in zip(self._memory, rows_SBNK, strict=True):
            if isinstance(self.window, Chunk):
                first, start = self.window.first, self.window.start
                memory[first : first + batch, :, start : start + length] = new.permute(1, 2, 0, 3)
            else:
                place_BN1K = self.window.positions[:, None, None, None].expand(
                    -1, new.shape[2], 1, new.shape[3]
                )
                memory[:batch].scatter_(2, place_BN1K, new[0].unsqueeze(2))

    def rows_of_chunk(self, *rows_SBNK: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of a chunk behind the earlier ones, [T, B, N, K]; stores them."""
        self.store(*rows_SBNK)
        assert isinstance(self.window, Chunk)
        length, batch = rows_SBNK[0].shape[:2]
        first, stop = self.window.first, self.window.start + length
        if stop == length:
            return rows_SBNK
        return tuple(memory[first : first + batch, :, :stop].permute(2, 0, 1, 3) for memory in self._memory)

    def of_next_tokens(
        self, query_SBNK: Tensor, rows_SBNK: Sequence[Tensor], compute: Callable[..., Tensor]
    ) -> Tensor:
        """Store the tokens' rows, and return compute(query_BNK, *stored_BNTK, span) of all spans, [1, B, ..].

        Args:
            query_SBNK: split by span, without its first dimension of 1.
            rows_SBNK: stored before anything is computed.
            compute: is given the stored rows of the span's slots.
        """
        self.store(*rows_SBNK)
        assert isinstance(self.window, NextTokens)
        parts = [
            compute(
                query_SBNK[0, span.first : span.stop],
                *(memory[span.first : span.stop, :, : span.num_keys] for memory in self._memory),
                span,
            )
            for span in self.window.spans
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the rows of the first `length` tokens of one slot to another."""
        for memory in self._memory:
            memory[target, :, :length] = memory[source, :, :length]
