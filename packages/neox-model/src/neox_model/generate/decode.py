"""Continue a prompt token by token, with a key-value cache or by recomputing the whole text."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from neox_model.layers.attention.kv_cache import caching
from neox_model.layers.lm_head import gather_vocabulary
from neox_model.parallel.groups import SINGLE_RANK, Group

__all__ = ["Continuation", "Decoder"]


@dataclass(frozen=True, slots=True)
class Continuation:
    """The continuation of a prompt.

    Args:
        tokens: the generated ids, without end-of-document.
        finished: True if the model ended the document.
        message: why there is no text, or why it ends; None if there is text.
    """

    tokens: list[int]
    finished: bool
    message: str | None = None


class Decoder:
    """Continues prompts, one at a time.

    Args:
        model: maps `tokens_BS` to `logits_BSV` of this rank's part of the vocabulary.
        choose: selects a token from the logits of one position.
        vocab_size: the tokenizer's vocabulary size, without padding.
        end_of_document: id of the token that ends a text.
        seq_length: maximum number of tokens of the model, prompt included.
        maximum_tokens: maximum number of tokens of one continuation.
        recompute: recompute the whole text for each token instead of caching keys and values.
        group: the tensor-parallel ranks; all must call together, with equal generators.
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
        group: Group = SINGLE_RANK,
    ) -> None:
        self._model = model
        self._choose = choose
        self._vocab_size = vocab_size
        self._end_of_document = end_of_document
        self._seq_length = seq_length
        self._maximum_tokens = maximum_tokens
        self._recompute = recompute
        self._group = group
        self.device = next(model.parameters()).device

    def continue_prompt(
        self,
        prompt: Sequence[int],
        generator: torch.Generator,
        *,
        should_end: Callable[[], bool] = lambda: False,
    ) -> Continuation:
        """Generate tokens until the end of the document or a limit. Collective over the group.

        Args:
            prompt: token ids; empty: start a new document.
            generator: a CPU generator, in the same state on every rank of the group.
            should_end: called before each token; True ends the continuation, on every rank of the group.
        """
        prompt = list(prompt) or [self._end_of_document]
        room = min(self._maximum_tokens, self._seq_length - len(prompt))
        if room <= 0:
            return Continuation(
                [],
                finished=False,
                message=f"the prompt's {len(prompt):,} tokens already fill seq_length ({self._seq_length:,})",
            )
        tokens: list[int] = []
        with self._next_logits() as next_logits:
            fresh = prompt
            while len(tokens) < room:
                if should_end():
                    return Continuation(tokens, finished=False, message="interrupted")
                token = self._choose(next_logits(fresh), generator)
                if token == self._end_of_document:
                    message = None if tokens else "the model ended the document immediately"
                    return Continuation(tokens, finished=True, message=message)
                tokens.append(token)
                fresh = [token]
        return Continuation(tokens, finished=False)

    @contextmanager
    def _next_logits(self) -> Iterator[Callable[[list[int]], Tensor]]:
        """Provide a function from the tokens added since its last call to the next token's logits."""
        seen: list[int] = []

        def logits_after(fresh: list[int]) -> Tensor:
            seen.extend(fresh)
            return self._last_logits(seen if self._recompute else fresh)

        with torch.no_grad(), nullcontext() if self._recompute else caching(self._model):
            yield logits_after

    def _last_logits(self, tokens: list[int]) -> Tensor:
        """Return logits_V over the tokenizer's vocabulary, the same on every rank."""
        tokens_BS = torch.tensor([tokens], dtype=torch.int64, device=self.device)
        logits_BV = self._model(tokens_BS)[:, -1]
        return gather_vocabulary(logits_BV, self._group, self._vocab_size)[0]
