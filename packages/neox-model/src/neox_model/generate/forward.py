"""Run the layers of this rank on prompts or next tokens, and return the logits after chosen tokens.

Each pipeline stage receives the hidden states of the stage before it; the last one has the logits. All ranks
of a copy of the model call together, with equal tokens.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from neox_model.assembly.as_sequential import SequentialModel
from neox_model.generate.packed import ROWS, PackedWeight, can_pack
from neox_model.layers.attention.kv_cache import KeyValueCaches
from neox_model.layers.cache import Chunk, NextTokens
from neox_model.layers.lm_head import LMHead, gather_vocabulary
from neox_model.parallel.groups import SINGLE_PROCESS, Groups

__all__ = ["Forward"]

# Rows of logits that exist at a time when texts are scored: 100 MB for a vocabulary of 50,000.
_SCORED_ROWS = 512


class Forward:
    """The forward pass of this rank's layers, with a cache of earlier tokens or without.

    One rule for all that generates and scores texts: log-probabilities are those of the loss in training,
    which add up to 1 over the model's whole vocabulary; the most likely tokens are the tokenizer's, because
    entries of the padding have no text. So `logits` returns the tokenizer's alone, with totals over all.

    Args:
        model: this rank's pipeline stage, or the whole model.
        hidden_size: width of the hidden states.
        vocab_size: the tokenizer's vocabulary size, without padding.
        model_vocab_size: entries of the model's vocabulary, with padding.
        groups: this rank's process groups.

    Attributes:
        model: the model.
        device: its device.
        vocab_size: as given.
    """

    def __init__(
        self,
        model: SequentialModel,
        *,
        hidden_size: int,
        vocab_size: int,
        model_vocab_size: int,
        groups: Groups = SINGLE_PROCESS,
    ) -> None:
        self.model = model
        self._hidden_size = hidden_size
        self._tensor, self._pipe = groups.model, groups.pipe
        self._is_first = self._pipe.rank == 0
        self._is_last = self._pipe.rank == self._pipe.size - 1
        layers = list(model.stack)
        # The head is the last layer of the last stage.
        self._body = layers[:-1] if self._is_last else layers
        self._head = layers[-1]
        parameter = next(model.parameters())
        self.device, self._dtype = parameter.device, parameter.dtype
        self.vocab_size = vocab_size
        self._model_vocab_size = model_vocab_size
        self._caches: KeyValueCaches | None = None
        self._packed: PackedWeight | None = None

    def allocate(self, *, slots: int, capacity: int) -> None:
        """Create caches of this many sequences and tokens; earlier ones are dropped.

        On a CPU in float32 the head's weight is copied to a faster layout; call again after it changes.
        """
        self.free()
        self._caches = KeyValueCaches(self.model, slots=slots, capacity=capacity)
        with self.model.autocast():
            if isinstance(self._head, LMHead) and can_pack(self._head.weight, rows=slots):
                self._packed = PackedWeight(self._head.weight, rows=slots)

    def free(self) -> None:
        """Drop what `allocate` created."""
        self._caches = self._packed = None

    def hidden_after(
        self, tokens_BS: Tensor, positions_BS: Tensor, window: Chunk | NextTokens | None
    ) -> Tensor | None:
        """Return hidden_SBD, the input of the head; None before the last stage.

        Args:
            tokens_BS: token ids; rows are padded at their end.
            positions_BS: position of each token in its sequence.
            window: what the tokens are to the caches; None: do not use them.
        """
        cached: AbstractContextManager[None] = nullcontext()
        if window is not None:
            assert self._caches is not None, "allocate() comes first"
            cached = self._caches.processing(window)
        with torch.no_grad(), self.model.autocast(), cached:
            hidden: Any = (tokens_BS, positions_BS) if self._is_first else self._receive(tokens_BS)
            for layer in self._body:
                hidden = layer(hidden)
            if not self._is_last:
                dist.send(
                    hidden.contiguous(), self._pipe.ranks[self._pipe.rank + 1], self._pipe.process_group
                )
                return None
            return torch.as_tensor(hidden)

    def logits(self, hidden_RD: Tensor, *, packed: bool = True) -> tuple[Tensor, Tensor]:
        """Return the logits_RV of hidden states, and their total_R. Collective over the last stage's ranks.

        The logits are those of the tokenizer's entries, without padding. The total is the logarithm of the
        sum of exponentials over the model's whole vocabulary: a log-probability is a logit less the total.

        Args:
            hidden_RD: hidden states before the head.
            packed: use the copy of the head's weight, if `allocate` made one.
        """
        copy = self._packed if packed else None
        with torch.no_grad(), self.model.autocast():
            if copy is not None and len(hidden_RD) in ROWS:
                part_RV = copy.product(hidden_RD)
            else:
                part_RV = self._head(hidden_RD.unsqueeze(0))[:, 0]
            logits_RV = gather_vocabulary(part_RV, self._tensor, self._model_vocab_size)
        return logits_RV[:, : self.vocab_size], logits_RV.float().logsumexp(1)

    def log_probabilities(
        self, tokens_BS: Tensor, places: tuple[Tensor, Tensor], targets_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return, on every rank, log-probabilities of tokens, and whether each is the most likely one.

        Nothing is cached. Logits exist for a part of the places at a time.

        Args:
            tokens_BS: token ids; rows are padded at their end.
            places: (row, index of a token) after which each target stands.
            targets_N: the token at each place.
        """
        positions_BS = torch.arange(tokens_BS.shape[1], device=self.device).expand_as(tokens_BS)
        hidden_SBD = self.hidden_after(tokens_BS, positions_BS, None)
        values_N = torch.zeros(len(targets_N), device=self.device)
        is_greedy_N = torch.zeros_like(targets_N)
        if hidden_SBD is not None:
            rows_N, columns_N = places
            for start in range(0, len(targets_N), _SCORED_ROWS):
                part = slice(start, start + _SCORED_ROWS)
                logits_NV, total_N = self.logits(hidden_SBD[columns_N[part], rows_N[part]], packed=False)
                chosen_N = logits_NV.gather(1, targets_N[part].unsqueeze(1)).squeeze(1)
                values_N[part] = chosen_N.float() - total_N
                is_greedy_N[part] = (logits_NV.argmax(-1) == targets_N[part]).long()
        values_N, is_greedy_N = self.share([values_N, is_greedy_N])
        return values_N, is_greedy_N.bool()

    def share(self, found: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of the first tensor-parallel rank of the last stage, on every rank.

        Other ranks pass tensors of the same shapes and types. Integers are exact up to 2**53.
        """
        if self._tensor.size * self._pipe.size == 1:
            return list(found)
        flat = torch.cat([one.double().flatten() for one in found])
        if self._is_last and self._tensor.size > 1:
            dist.broadcast(flat, self._tensor.ranks[0], self._tensor.process_group)
        if self._pipe.size > 1:
            dist.broadcast(flat, self._pipe.ranks[-1], self._pipe.process_group)
        parts = flat.split([one.numel() for one in found])
        return [part.view_as(one).to(one.dtype) for part, one in zip(parts, found, strict=True)]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the stored rows of the first `length` tokens of one slot to another."""
        if self._caches is not None:
            self._caches.move(source, target, length)

    def _receive(self, tokens_BS: Tensor) -> Tensor:
        batch, length = tokens_BS.shape
        hidden_SBD = torch.empty(length, batch, self._hidden_size, dtype=self._dtype, device=self.device)
        dist.recv(hidden_SBD, self._pipe.ranks[self._pipe.rank - 1], self._pipe.process_group)
        return hidden_SBD
