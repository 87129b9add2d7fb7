"""Serve requests for text: waiting ones enter the batch as soon as others leave it.

    engine = Engine(Batch(...), tokenizer, ...)
    ticket = engine.submit(Request(prompt=[...], maximum_tokens=64))
    while engine.is_busy:
        for update in engine.step():
            ...                               # new text of update.ticket; update.reply when it is complete

Every rank of a copy of the model makes the same calls in the same order; all receive the same updates. A
reply depends on its request alone, not on the others in the batch.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from neox_config.errors import ConfigError
from neox_data.tokenizers import Tokenizer
from neox_model.generate.batch import Batch, NewTokens, Request
from neox_model.generate.text import ReplyText

__all__ = ["Engine", "FinishReason", "Reply", "Update", "not_finite"]

FinishReason = Literal[
    "end-of-document", "stop-string", "maximum-tokens", "seq-length", "interrupted", "prompt-too-long"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The continuation of a prompt.

    Args:
        tokens: the generated ids, without end-of-document or the stop token; with those of a stop string.
        log_probabilities: of these tokens, under the model (temperature 1, no filter, no penalty).
        logits: of these tokens, one row each, if they were requested.
        text: their text, without the stop string.
        finish_reason: why it ends.
        message: why there is no text, or that it was interrupted; None otherwise.
        duration_seconds: time in the batch.
        is_finite: False if the model's output contained a NaN or Infinity, so that a token is arbitrary.
    """

    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    logits: list[list[float]] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason
    message: str | None
    duration_seconds: float = 0.0
    is_finite: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one step added to a reply.

    Args:
        ticket: as returned by `submit`.
        text: new text, whole characters; what may become a stop string comes later.
        new: the new tokens, also end-of-document if it ends the reply; in the first update with the scores of
            the prompt's tokens behind the first, if they were requested.
        reply: the whole reply if it is complete, else None.
    """

    ticket: int
    text: str
    new: NewTokens
    reply: Reply | None


@dataclass(slots=True)
class _Running:
    """A request in a slot of the batch."""

    ticket: int
    room: int
    limit: FinishReason
    text: ReplyText
    # Tokens that were chosen, read or not.
    chosen: int = 1
    started: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    logits: list[list[float]] = field(default_factory=list)
    is_finite: bool = True


def not_finite(text: str = "") -> str:
    """Return the message about an output of the model that contains a NaN or Infinity.

    Args:
        text: of which text, as in " for text 3"; empty: of any.
    """
    return (
        f"the model's output{text} is not finite, so its tokens and probabilities are arbitrary; compute in "
        "bfloat16 or fp32, or use a checkpoint from before the loss diverged (neox-checkpoint verify reports "
        "weights that are not finite)"
    )


class Engine:
    """Decodes requests in a batch, which they enter and leave at any time.

    Args:
        batch: decodes the sequences in its slots.
        tokenizer: converts ids to text.
        stop_tokens: ids of tokens that end a text, as end-of-document does.
        steps_per_read: tokens that each sequence gets before they are read from the device and checked for
            the end of the text; those behind an end are dropped. 1 delivers every token at once.

    Raises:
        ConfigError: the tokenizer has no such token.
    """

    def __init__(
        self,
        batch: Batch,
        tokenizer: Tokenizer,
        *,
        stop_tokens: Collection[int] = (),
        steps_per_read: int = 1,
    ) -> None:
        for token in stop_tokens:
            if token >= tokenizer.vocab_size:
                raise ConfigError(
                    f"stop-tokens contains {token}, but the tokenizer's ids are 0 to "
                    f"{tokenizer.vocab_size - 1}; remove it"
                )
        self._batch = batch
        self._tokenizer = tokenizer
        self._ends = {tokenizer.end_of_document, *stop_tokens}
        self._steps_per_read = steps_per_read
        self._waiting: deque[tuple[int, Request]] = deque()
        # By slot of the batch.
        self._running: list[_Running] = []
        self._next_ticket = 0
        self._has_advanced = True

    @property
    def is_busy(self) -> bool:
        """Return True if a request waits or runs."""
        return bool(self._waiting or self._running)

    def submit(self, request: Request) -> int:
        """Add a request behind the waiting ones. Returns its ticket."""
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._waiting.append((ticket, request))
        return ticket

    def cancel(self, ticket: int) -> Reply | None:
        """End a request. Returns the reply as far as it is; None if it is not waiting or running."""
        for place, running in enumerate(self._running):
            if running.ticket == ticket:
                self._release(place)
                return self._reply(running, "interrupted")
        for entry in self._waiting:
            if entry[0] == ticket:
                self._waiting.remove(entry)
                return Reply(finish_reason="interrupted", message="interrupted before it began")
        return None

    def step(self) -> list[Update]:
        """Admit waiting requests, decode some tokens, and return what is new. Collective over the copy.

        A call that admits may give the others no token; the next one then admits none, so that a stream of
        new requests does not stop the running ones.
        """
        before = len(self._running)
        updates = self._admit() if self._has_advanced or not before else []
        if not self._running:
            return updates
        steps = self._steps_per_read - (len(self._running) > before)
        steps = min(steps, *(one.room - one.chosen for one in self._running))
        self._has_advanced = steps > 0
        for _ in range(steps):
            self._batch.step()
            for running in self._running:
                running.chosen += 1
        ended = []
        for place, (running, new) in enumerate(zip(self._running, self._batch.read(), strict=True)):
            updates.append(self._update(running, new))
            if updates[-1].reply is not None:
                ended.append(place)
        # From the last one on, so that the slots of the others stay theirs.
        for place in reversed(ended):
            self._release(place)
        return updates

    def replies(
        self, requests: Iterable[Request], note: Callable[[int], None] = lambda new_tokens: None
    ) -> Iterator[Reply]:
        """Submit all requests, and yield their replies in the same order.

        Args:
            requests: the requests.
            note: called after each step with the number of tokens that it decoded.
        """
        expected = deque([self.submit(request) for request in requests])
        found: dict[int, Reply] = {}
        while expected:
            while expected and expected[0] in found:
                yield found.pop(expected.popleft())
            if expected:
                updates = self.step()
                note(sum(len(update.new.tokens) for update in updates))
                found |= {update.ticket: update.reply for update in updates if update.reply is not None}

    def _admit(self) -> list[Update]:
        """Move waiting requests to free slots. Returns the replies to prompts that are too long."""
        refused: list[Update] = []
        entering: list[_Running] = []
        admissions: list[Request] = []
        while self._waiting and len(self._running) + len(entering) < self._batch.slots:
            ticket, request = self._waiting.popleft()
            prompt = list(request.prompt) or [self._tokenizer.end_of_document]
            left = self._batch.capacity - len(prompt)
            if left < min(1, request.maximum_tokens):
                what = (
                    f"the prompt's {len(prompt):,} tokens already fill seq_length ({self._batch.capacity:,})"
                )
                reply = Reply(finish_reason="prompt-too-long", message=what)
                refused.append(Update(ticket=ticket, text="", new=NewTokens([], []), reply=reply))
                continue
            room = min(left, request.maximum_tokens)
            limit: FinishReason = "seq-length" if left < request.maximum_tokens else "maximum-tokens"
            text = ReplyText(self._tokenizer.continued(request.prompt), request.stop_strings)
            entering.append(_Running(ticket=ticket, room=room, limit=limit, text=text))
            admissions.append(replace(request, prompt=prompt, maximum_tokens=room))
        first = len(self._running)
        self._running += entering
        for place, running in zip(self._batch.admit(admissions), entering, strict=True):
            assert place >= first, "slots in use are the first ones"
            self._running[place] = running
        return refused

    def _update(self, running: _Running, new: NewTokens) -> Update:
        """Add tokens to a reply, up to its end."""
        reason: FinishReason | None = None if running.room else running.limit
        count = 0
        for token, value in zip(new.tokens, new.log_probabilities, strict=True):
            if reason is not None:
                break
            count += 1
            running.is_finite &= math.isfinite(value)
            if token in self._ends:
                reason = "end-of-document"
                continue
            running.tokens.append(token)
            running.log_probabilities.append(value)
            running.logits += new.logits[count - 1 : count]
            if running.text.add(token):
                reason = "stop-string"
            elif len(running.tokens) == running.room:
                reason = running.limit
        added = NewTokens(new.tokens[:count], new.log_probabilities[:count], new.top[:count], new.prompt)
        reply = None if reason is None else self._reply(running, reason)
        text = running.text.take()
        return Update(ticket=running.ticket, text=text, new=added, reply=reply)

    def _reply(self, running: _Running, reason: FinishReason) -> Reply:
        message = "interrupted" if reason == "interrupted" else None
        if reason == "end-of-document" and not running.tokens:
            message = "the model ended the document immediately"
        return Reply(
            tokens=running.tokens,
            log_probabilities=running.log_probabilities,
            logits=running.logits,
            text=running.text.finish(),
            finish_reason=reason,
            message=message,
            duration_seconds=time.perf_counter() - running.started,
            is_finite=running.is_finite,
        )

    def _release(self, place: int) -> None:
        moved = self._running.pop()
        if place < len(self._running):
            self._running[place] = moved
        self._batch.release(place)
