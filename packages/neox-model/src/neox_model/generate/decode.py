"""Continuing a prompt token by token, with cached keys and values or by computing the whole text again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from neox_model.layers.attention.kv_cache import caching
from neox_model.layers.lm_head import gather_vocabulary
from neox_model.parallel.groups import SINGLE, Group

__all__ = ["Continuation", "Decoder"]


@dataclass(frozen=True, slots=True)
class Continuation:
    """What followed a prompt.

    Args:
        tokens: the generated ids, end-of-document left out.
        finished: whether the model ended the document itself.
        message: why there is no text, when there is none.
    """

    tokens: list[int]
    finished: bool
    message: str | None = None


class Decoder:
    """Continues prompts, one at a time.

    Args:
        model: takes `tokens_BS` to `logits_BSV` of this rank's part of the vocabulary.
        choose: picks a token from one place's logits.
        vocab_size: the tokenizer's entries; the rows that padding adds are never seen.
        end_of_document: the id that ends a text.
        seq_length: most tokens that the model takes, prompt included.
        maximum_tokens: most tokens of one continuation.
        recompute: compute the whole text for each token instead of keeping keys and values.
        group: the tensor-parallel ranks; all of them must call together, with equal generators.
    """

    def __init__(
        self,
        model: nn.Module,
        choose: Callable[[Tensor, torch.Generator], int],
        *,
        vocab_size: int,
        end_of_document: int,
        seq_length: int,
        maximum_tokens: int,
        recompute: bool = False,
        group: Group = SINGLE,
    ) -> None:
        self._model = model
        self._choose = choose
        self._vocab_size = vocab_size
        self._end_of_document = end_of_document
        self._seq_length = seq_length
        self._maximum_tokens = maximum_tokens
        self._recompute = recompute
        self._group = group
        self._device = next(model.parameters()).device

    def continue_prompt(self, prompt: Sequence[int], generator: torch.Generator) -> Continuation:
        """Tokens after the prompt, up to the end of the document or a limit. Collective over the group.

        Args:
            prompt: ids; an empty one stands for the beginning of a document.
            generator: a CPU generator, in the same state on every rank of the group.
        """
        prompt = list(prompt) or [self._end_of_document]
        room = min(self._maximum_tokens, self._seq_length - len(prompt))
        if room <= 0:
            return Continuation(
                [],
                finished=False,
                message=f"the prompt's {len(prompt):,} tokens fill seq_length, which is {self._seq_length:,}",
            )
        tokens: list[int] = []
        with self._next_logits() as next_logits:
            fresh = prompt
            while len(tokens) < room:
                token = self._choose(next_logits(fresh), generator)
                if token == self._end_of_document:
                    message = None if tokens else "the model ended the document at once"
                    return Continuation(tokens, finished=True, message=message)
                tokens.append(token)
                fresh = [token]
        return Continuation(tokens, finished=False)

    @contextmanager
    def _next_logits(self) -> Iterator[Callable[[list[int]], Tensor]]:
        """A function of the tokens that are new since its last call; gives the logits after them."""
        seen: list[int] = []

        def logits_after(fresh: list[int]) -> Tensor:
            seen.extend(fresh)
            return self._last_logits(seen if self._recompute else fresh)

        with torch.no_grad(), nullcontext() if self._recompute else caching(self._model):
            yield logits_after

    def _last_logits(self, tokens: list[int]) -> Tensor:
        """logits_V over the tokenizer's vocabulary, the same on every rank."""
        tokens_BS = torch.tensor([tokens], dtype=torch.int64, device=self._device)
        logits_BV = self._model(tokens_BS)[:, -1]
        return gather_vocabulary(logits_BV, self._group, self._vocab_size)[0]
