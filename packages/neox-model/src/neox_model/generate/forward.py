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
from neox_model.generate.sampling import most_likely
from neox_model.layers.attention.kv_cache import KeyValueCaches
from neox_model.layers.cache import Chunk, NextTokens
from neox_model.layers.lm_head import gather_vocabulary
from neox_model.layers.positions import lengths_of_requests
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

    def allocate(self, *, slots: int, capacity: int) -> None:
        """Create caches of this many sequences and tokens; earlier ones are dropped."""
        self.free()
        self._caches = KeyValueCaches(self.model, slots=slots, capacity=capacity)

    def free(self) -> None:
        """Drop what `allocate` created."""
        self._caches = None

    def hidden_after(
        self,
        tokens_BS: Tensor,
        positions_BS: Tensor,
        window: Chunk | NextTokens | None,
        lengths_B: Tensor,
    ) -> Tensor | None:
        """Return hidden_SBD, the input of the head; None before the last stage.

        Args:
            tokens_BS: token ids; rows are padded at their end.
            positions_BS: position of each token in its sequence.
            window: what the tokens are to the caches; None: do not use them.
            lengths_B: the most tokens of each sequence that the model may read for its request.
        """
        cached: AbstractContextManager[None] = nullcontext()
        if window is not None:
            assert self._caches is not None, "allocate() comes first"
            cached = self._caches.processing(window)
        of_requests = lengths_of_requests(self.model, lengths_B)
        with torch.no_grad(), self.model.autocast(), cached, of_requests:
            hidden: Any = (tokens_BS, positions_BS) if self._is_first else self._receive(tokens_BS)
            for layer in self._body:
                hidden = layer(hidden)
            if not self._is_last:
                dist.send(
                    hidden.contiguous(), self._pipe.ranks[self._pipe.rank + 1], self._pipe.process_group
                )
                return None
            return torch.as_tensor(hidden)

    def logits(self, hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits_RV of hidden states, and their total_R. Collective over the last stage's ranks.

        The logits are those of the tokenizer's entries, without padding. The total is the logarithm of the
        sum of exponentials over the model's whole vocabulary: a log-probability is a logit less the total.
        """
        with torch.no_grad(), self.model.autocast():
            part_RV = self._head(hidden_RD.unsqueeze(0))[:, 0]
            logits_RV = gather_vocabulary(part_RV, self._tensor, self._model_vocab_size)
        return logits_RV[:, : self.vocab_size], logits_RV.float().logsumexp(1)

    def log_probabilities(
        self, tokens_BS: Tensor, places: tuple[Tensor, Tensor], targets_N: Tensor, lengths_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return, on every rank, log-probabilities of tokens, and whether each is the most likely one.

        Nothing is cached.

        Args:
            tokens_BS: token ids; rows are padded at their end.
            places: (row, index of a token) after which each target stands.
            targets_N: the token at each place.
            lengths_B: tokens of each row without the padding.
        """
        positions_BS = torch.arange(tokens_BS.shape[1], device=self.device).expand_as(tokens_BS)
        hidden_SBD = self.hidden_after(tokens_BS, positions_BS, None, lengths_B)
        hidden_ND = None if hidden_SBD is None else hidden_SBD[places[1], places[0]]
        values_N, best_N, *_ = self.scores(hidden_ND, targets_N)
        return values_N, best_N == targets_N

    def scores(self, hidden_ND: Tensor | None, targets_N: Tensor, *, top_count: int = 0) -> list[Tensor]:
        """Return, on every rank, log-probabilities of tokens, and the most likely ones.

        Logits exist for a part of the targets at a time.

        Args:
            hidden_ND: hidden states before the head; None before the last stage.
            targets_N: token ids.
            top_count: number of most likely tokens.

        Returns:
            values_N of the targets, best_N (the most likely token), and ids_NC with their values_NC.
        """
        values_N = torch.zeros(len(targets_N), device=self.device)
        values_NC, best_N = values_N[:, None].repeat(1, top_count), torch.zeros_like(targets_N)
        ids_NC = values_NC.long()
        if hidden_ND is not None:
            for start in range(0, len(targets_N), _SCORED_ROWS):
                part = slice(start, start + _SCORED_ROWS)
                logits_NV, total_N = self.logits(hidden_ND[part])
                values_N[part] = logits_NV.gather(1, targets_N[part, None])[:, 0].float() - total_N
                best_N[part] = logits_NV.argmax(1)
                if top_count:
                    ids_NC[part], values_NC[part] = most_likely(logits_NV, total_N, top_count)
        return self.share([values_N, best_N, ids_NC, values_NC])

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
